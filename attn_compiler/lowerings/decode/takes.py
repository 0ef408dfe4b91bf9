"""Sites that the decode kernels take."""

from __future__ import annotations

import dataclasses

from attn_compiler.lowerings.shared.limits import kernel_limits
from attn_compiler.spec.dtypes import HALF

_ADDED_BY_DISTANCE = frozenset({"documents", "distances", "slopes"})

TAKES = dataclasses.replace(
    kernel_limits.TAKES, parts=kernel_limits.TAKES.parts - {"documents"}, gradients=False, dropout=False, lse="read"
)
#: over a latent, where each row of a tile is one head: nothing is added by distance, and the model's own head dims do not matter
OF_LATENT = dataclasses.replace(
    kernel_limits.TAKES,
    parts=kernel_limits.TAKES.parts - _ADDED_BY_DISTANCE,
    head_dims=None,
    gradients=False,
    dropout=False,
    lse="unread",
)
#: by the kernel for Hopper: bounds of keys alone, and a positive scale as the scores' only change
ON_HOPPER = dataclasses.replace(
    OF_LATENT, sms=((90, 90),), dtypes=HALF, changes=(), parts=frozenset({"band", "lengths", "rows"}), scales="positive"
)
