"""Which (query, key) pairs an attention may use: `MaskSpec` is a conjunction of kinds. Pure data, no FX, no CUDA.

To add a kind: one class here with `words`, its name in KINDS, and its test. Lowerings refuse a kind until they list it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Alignment(enum.Enum):
    """Which corner of the (Sq, Skv) rectangle a causal diagonal starts from. PyTorch's is_causal is TOP_LEFT."""

    TOP_LEFT = "top_left"
    BOTTOM_RIGHT = "bottom_right"


@dataclass(frozen=True, kw_only=True, slots=True)
class Causal:
    """Key k is allowed for query q when k <= q (TOP_LEFT) or k <= q + Skv - Sq (BOTTOM_RIGHT)."""

    alignment: Alignment = Alignment.TOP_LEFT

    @property
    def words(self) -> str:
        return "causal" if self.alignment is Alignment.TOP_LEFT else "causal (bottom-right)"

    def mask_mod(self, q: int, k: int, *, seqlen_q: int, seqlen_kv: int) -> bool:
        """The kind's meaning for one pair: the reference that every kernel and every recovery is held against."""
        shift = 0 if self.alignment is Alignment.TOP_LEFT else seqlen_kv - seqlen_q
        return k <= q + shift


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """A ready-made tensor operand that broadcasts to (B, Hq, Sq, Skv).

    shape: its own broadcast shape (1 where it does not vary). dtype "bool" means True = allowed; a float dtype is added
    to the scaled scores.
    terms: how many tensors of the model were combined into it.
    """

    shape: tuple[int | str, ...]
    dtype: str
    terms: int = 1

    @property
    def is_bool(self) -> bool:
        return self.dtype == "bool"

    @property
    def words(self) -> str:
        dims = ", ".join(str(d) for d in self.shape)
        what = "dense bool" if self.is_bool else f"dense additive {self.dtype}"
        return f"{what}[{dims}]" + (f" from {self.terms} tensors" if self.terms > 1 else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Opaque:
    """A mask that was seen and could not be described; a lowering that isn't `untouched` must refuse it."""

    reason: str

    @property
    def words(self) -> str:
        return f"opaque ({self.reason})"


MaskKind = Causal | Dense | Opaque
KINDS: tuple[type[MaskKind], ...] = (Causal, Dense, Opaque)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskSpec:
    """All of `kinds` must allow a pair. Empty: every pair is allowed."""

    kinds: tuple[MaskKind, ...] = ()

    @property
    def words(self) -> str:
        return " ∧ ".join(kind.words for kind in self.kinds) or "none"

    @property
    def is_causal(self) -> bool:
        return any(isinstance(kind, Causal) for kind in self.kinds)

    @property
    def dense(self) -> Dense | None:
        """The dense operand, if there is one (recovery combines several into one)."""
        return next((kind for kind in self.kinds if isinstance(kind, Dense)), None)


NO_MASK = MaskSpec()
