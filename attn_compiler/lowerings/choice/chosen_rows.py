"""From how many keys on a prompt's chosen keys are read alone, over their latent: only where that was measured to be faster."""

from __future__ import annotations

from collections.abc import Mapping

from attn_compiler.spec import dims
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target

#: by compute capability: keys of the sequence for each chosen one. No machine was measured yet.
TIMES: Mapping[int, float] = {}


def is_faster(spec: AttentionSpec, target: Target) -> bool:
    """Whether the chosen keys are few enough, in every call."""
    chosen, times = spec.mask.chosen, TIMES.get(target.sm)
    if chosen is None or chosen.keys is None or times is None:
        return False
    return dims.range_of(spec, spec.seqlen_kv)[0] >= times * chosen.keys
