"""What the kernels for Hopper take, of what our kernels share. What they don't take, the Triton family does."""

from __future__ import annotations

import dataclasses

from attn_compiler.lowerings.fp8.rounding import VECTOR
from attn_compiler.lowerings.shared.limits import kernel_limits
from attn_compiler.lowerings.shared.limits.takes import HeadDims
from attn_compiler.spec.dtypes import HALF
from attn_compiler.spec.scores import Sinks, Softcap

TAKES = dataclasses.replace(
    kernel_limits.TAKES,
    sms=((90, 90),),
    dtypes=HALF,
    changes=(Softcap, Sinks),
    parts=frozenset({"band", "lengths", "rows", "keys", "documents", "slopes", "mask", "bias", "distances"}),
    # The copy engine reads vectors of 16 bytes.
    head_dims=HeadDims(multiple=8, in_full=8, most=512),
    scales="positive",
    dropout=False,
)

#: of q, k and v that are rounded from half precision. fp8.py refuses scales, dropout and other parts in words of its own, since
#: `triton_fp8` takes them.
FP8 = dataclasses.replace(
    TAKES,
    parts=frozenset({"band", "lengths"}),
    lse="unread",
    # Beyond, registers hold no sum of one tile beside the sum of all.
    head_dims=HeadDims(multiple=VECTOR, in_full=VECTOR, most=128),
)
