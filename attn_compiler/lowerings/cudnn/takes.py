"""Sites that cuDNN's own graphs take, whatever the version of cuDNN."""

from __future__ import annotations

from attn_compiler.lowerings.shared.limits.takes import OWN, HeadDims, Takes, since
from attn_compiler.spec.scores import Sinks

#: a dtype -> cuDNN's name of it
NAMES = {"float16": "HALF", "bfloat16": "BFLOAT16"}

TAKES = Takes(
    sms=since(80),
    dtypes=tuple(NAMES),
    changes=(Sinks,),
    parts=frozenset({"band", "lengths", "bias"}),
    tensors=(OWN,),
    head_dims=HeadDims(multiple=8, in_full=8, most=256),
    symbolic_sizes=False,
)
