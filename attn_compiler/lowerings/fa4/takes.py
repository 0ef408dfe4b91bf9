"""Sites that FlashAttention-4's functions have arguments for."""

from __future__ import annotations

from attn_compiler.lowerings.shared.limits.takes import HeadDims, Takes
from attn_compiler.spec.dtypes import HALF
from attn_compiler.spec.scores import Sinks, Softcap

TAKES = Takes(
    sms=((90, 90), (100, 109)),
    dtypes=HALF,
    changes=(Softcap, Sinks),
    parts=frozenset({"band"}),
    # Heads are whole vectors.
    head_dims=HeadDims(multiple=8, in_full=8, most=256),
    dropout=False,
)
