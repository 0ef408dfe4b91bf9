"""What our kernels in FP8 take, of what our kernels share. q, k and v are rounded from half precision."""

from __future__ import annotations

import dataclasses

from attn_compiler.dtypes import HALF
from attn_compiler.lowerings.fp8.rounding import VECTOR
from attn_compiler.lowerings.shared import kernel_limits
from attn_compiler.lowerings.shared.takes import HeadDims, since
from attn_compiler.scores import Sinks, Softcap

#: from the first with FP8 in its tensor cores
TRITON = dataclasses.replace(kernel_limits.TAKES, sms=since(89), dtypes=HALF)

#: hopper.py refuses scales, dropout and other parts in words of its own, since `triton_fp8` takes them.
HOPPER = dataclasses.replace(
    TRITON,
    sms=((90, 90),),
    changes=(Softcap, Sinks),
    parts=frozenset({"band", "lengths"}),
    # Beyond, registers hold no sum of one tile beside the sum of all.
    head_dims=HeadDims(multiple=VECTOR, in_full=VECTOR, most=128),
    scales="positive",
    dropout=False,
)
