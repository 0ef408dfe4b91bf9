"""Arguments of FlashAttention-4's kernels for one attention: pure data, made from the spec alone.

Its windows are counted from the end: key k is allowed for query q when q + Skv - Sq - left <= k <= q + Skv - Sq + right.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from attn_compiler.lowerings.shared.parts import site_parts as parts
from attn_compiler.spec.attention import AttentionSpec, Dim
from attn_compiler.spec.codec import Coded


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Arguments by name. left, right: keys back from the query and ahead of it; None where a side is open. sinks, sinks_grad: there are
    some, and they are learned. scale, softcap: as in ScoreSpec."""

    left: int | None
    right: int | None
    scale: float
    softcap: float | None
    sinks: bool
    sinks_grad: bool

    @property
    def causal(self) -> bool:
        """True for a plain causal mask, which has kernels of its own."""
        return self.left is None and self.right == 0

    @property
    def window(self) -> tuple[int | None, int | None]:
        """Window that the kernels take besides the causal flag."""
        return (None, None) if self.causal else (self.left, self.right)


@functools.lru_cache(maxsize=1024)
def settings_of(spec: AttentionSpec) -> Settings:
    """Return the settings for a spec that the lowering does not refuse."""
    band, sinks = parts.parts(spec).band, spec.score.sinks
    return Settings(
        left=None if band is None else _bounding(band.left, spec.seqlen_kv),
        right=None if band is None else _bounding(band.right, spec.seqlen_kv),
        scale=spec.score.scale,
        softcap=spec.score.softcap,
        sinks=sinks is not None,
        sinks_grad=sinks is not None and sinks.requires_grad and spec.needs_grad,
    )


def _bounding(side: int | None, seqlen_kv: Dim) -> int | None:
    """Return the side, or None if it reaches beyond every key: Mistral's window of 4096 at 2048 tokens."""
    is_open = side is not None and isinstance(seqlen_kv, int) and side >= seqlen_kv - 1
    return None if is_open else side


@dataclass(frozen=True, kw_only=True, slots=True)
class Fa4Call(Coded):
    """Everything decided on a call at compile time, which the leaf op's text holds.

    version: of flash-attn-4. sm: the architecture that its kernels are compiled for. deterministic: gradients are added up in order.
    """

    spec: AttentionSpec
    version: str
    sm: int
    deterministic: bool

    @property
    def settings(self) -> Settings:
        return settings_of(self.spec)


Fa4Call.codec = AttentionSpec.codec.extended(Fa4Call, brief=True)
