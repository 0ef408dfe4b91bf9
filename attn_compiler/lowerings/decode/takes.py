"""What the decode kernel takes, of what our kernels share."""

from __future__ import annotations

import dataclasses

from attn_compiler.lowerings.shared.limits import kernel_limits
from attn_compiler.spec.dtypes import HALF

_ADDED_BY_DISTANCE = frozenset({"documents", "distances", "slopes"})

TAKES = dataclasses.replace(
    kernel_limits.TAKES, parts=kernel_limits.TAKES.parts - {"documents"}, gradients=False, dropout=False, lse="read"
)
#: over a latent, of which each row is one head: nothing that is added by distance, and any head dims of the model's own
OF_LATENT = dataclasses.replace(
    kernel_limits.TAKES,
    parts=kernel_limits.TAKES.parts - _ADDED_BY_DISTANCE,
    head_dims=None,
    gradients=False,
    dropout=False,
    lse="unread",
)
#: by the kernel for Hopper: bounds of keys alone, and nothing that changes a score but a positive scale
ON_HOPPER = dataclasses.replace(
    OF_LATENT,
    sms=((90, 90),),
    dtypes=HALF,
    changes=(),
    parts=frozenset({"band", "lengths", "rows"}),
    scales="positive",
)
