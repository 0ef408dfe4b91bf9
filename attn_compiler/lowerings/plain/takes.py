"""What attention in plain PyTorch takes: nearly everything that a spec can say."""

from __future__ import annotations

from attn_compiler.lowerings.shared.takes import Takes
from attn_compiler.scores import Sinks, Softcap

_DTYPES = ("float32", "float64", "bfloat16", "float16")

MATH = Takes(
    sms=None,
    dtypes=_DTYPES,
    changes=(Softcap, Sinks),
    scales="any",
    many_blocks=True,
    float64_softmax=True,
)

REFERENCE = Takes(
    sms=None,
    dtypes=_DTYPES,
    changes=(Softcap, Sinks),
    scales="any",
    any_shape=True,
    many_blocks=True,
    dropout=False,
    float64_softmax=True,
)
