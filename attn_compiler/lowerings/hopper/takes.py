"""Sites that the kernels for Hopper take. The Triton family takes the others."""

from __future__ import annotations

import dataclasses

from attn_compiler.lowerings.fp8 import VECTOR
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

#: For q, k and v rounded from half precision. fp8.py refuses scales, dropout and other parts in words of its own.
FP8 = dataclasses.replace(
    TAKES,
    parts=frozenset({"band", "lengths"}),
    lse="unread",
    # Above that, registers have no room for one tile's sum beside the sum of all.
    head_dims=HeadDims(multiple=VECTOR, in_full=VECTOR, most=128),
)
