"""The sites that attention in plain PyTorch takes: nearly every spec."""

from __future__ import annotations

import dataclasses

from attn_compiler.lowerings.shared.limits.takes import Takes
from attn_compiler.lowerings.shared.parts import score_changes
from attn_compiler.spec.scores import Sinks

MATH = Takes(
    sms=None,
    dtypes=("float32", "float64", "bfloat16", "float16"),
    changes=(*score_changes.KINDS, Sinks),
    scales="any",
    many_blocks=True,
    float64_softmax=True,
    lse="differentiated",
)

#: the lowering that reads the latent in place of k and v
ABSORBED = dataclasses.replace(MATH, dropout=False, gradients=False, lse="unread")

REFERENCE = dataclasses.replace(MATH, any_shape=True, dropout=False)
