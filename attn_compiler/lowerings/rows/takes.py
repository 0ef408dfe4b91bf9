"""The sites that attention by rows takes on a CPU: masks that leave keys in pieces, and biases by distance."""

from __future__ import annotations

from attn_compiler.lowerings.shared.limits.takes import PYTORCH_HALF, HeadDims, Takes

TAKES = Takes(
    sms=None,
    dtypes=("float32", "float64", *PYTORCH_HALF),
    parts=frozenset({"band", "lengths", "rows", "keys", "documents", "distances", "slopes"}),
    head_dims=HeadDims(multiple=1, in_full=1),
    unequal_head_dims=False,
    many_blocks=True,
    dropout=False,
)
