"""Sites that our Triton kernels in FP8 take. q, k and v are rounded from half precision."""

from __future__ import annotations

import dataclasses

from attn_compiler.lowerings.shared.limits import kernel_limits
from attn_compiler.lowerings.shared.limits.takes import HeadDims, since
from attn_compiler.spec.dtypes import HALF

#: from the first GPU with FP8 in its tensor cores on
FP8 = dataclasses.replace(
    kernel_limits.TAKES,
    sms=since(89),
    dtypes=HALF,
    head_dims=HeadDims(multiple=8, in_full=8, most=256),
    lse="unread",
)
