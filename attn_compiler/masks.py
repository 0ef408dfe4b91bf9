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
class CausalFrom:
    """k <= q + offset, where the offset is a formula over sizes and run-time tensors (a cache's length)."""

    offset: str

    @property
    def words(self) -> str:
        return f"causal from {self.offset}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlidingWindow:
    """q - left <= k <= q + right; None is no bound on that side."""

    left: int | None
    right: int | None

    @property
    def words(self) -> str:
        sides = [f"{n} {side}" for n, side in ((self.left, "back"), (self.right, "ahead")) if n is not None]
        return f"window ({', '.join(sides)})"

    def mask_mod(self, q: int, k: int) -> bool:
        """The kind's meaning for one pair."""
        return (self.left is None or k >= q - self.left) and (self.right is None or k <= q + self.right)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyPadding:
    """Key k of batch row b is allowed where `tensor` says so, whatever the query. text: the condition as a formula."""

    tensor: str
    text: str
    inverted: bool = False

    @property
    def words(self) -> str:
        return f"key padding {self.text}"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyBound:
    """k <= bound ("last") or k >= bound ("first"), a formula over run-time tensors: the filled part of a cache."""

    side: str
    bound: str

    @property
    def words(self) -> str:
        return f"keys {'up to' if self.side == 'last' else 'from'} {self.bound}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """Query and key belong to the same document: tensor[b, q] == tensor[b, k]."""

    tensor: str

    @property
    def words(self) -> str:
        return f"document {self.tensor}[b, q] = {self.tensor}[b, k]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunked:
    """Query and key fall into the same chunk of `size` positions (Llama 4)."""

    size: int

    @property
    def words(self) -> str:
        return f"chunks of {self.size}"

    def mask_mod(self, q: int, k: int) -> bool:
        """The kind's meaning for one pair."""
        return q // self.size == k // self.size


@dataclass(frozen=True, kw_only=True, slots=True)
class AnyOf:
    """One of the alternatives holds, each a conjunction of kinds (a prefix that all may see, an image block)."""

    alternatives: tuple[tuple[ProvedKind, ...], ...]

    @property
    def words(self) -> str:
        return " or ".join("(" + " ∧ ".join(k.words for k in kinds) + ")" for kinds in self.alternatives)


@dataclass(frozen=True, kw_only=True, slots=True)
class Formula:
    """A condition that was read in full and has no kind of its own yet."""

    text: str

    @property
    def words(self) -> str:
        return self.text


ProvedKind = Causal | CausalFrom | SlidingWindow | KeyPadding | KeyBound | Document | Chunked | AnyOf | Formula
PROVED_KINDS: tuple[type[ProvedKind], ...] = (
    Causal,
    CausalFrom,
    SlidingWindow,
    KeyPadding,
    KeyBound,
    Document,
    Chunked,
    AnyOf,
    Formula,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskSpec:
    """All of `kinds` must allow a pair; empty: every pair is allowed. These are what a lowering has to apply.

    proved: kinds whose conjunction the mask was shown to be, read off the model's graph; they say what a Dense tensor means.
    reason: why it could not be read, where it could not.
    """

    kinds: tuple[MaskKind, ...] = ()
    proved: tuple[ProvedKind, ...] = ()
    reason: str | None = None

    @property
    def words(self) -> str:
        applied = " ∧ ".join(kind.words for kind in self.kinds) or "none"
        meaning = " ∧ ".join(kind.words for kind in self.proved)
        if meaning == applied:
            return f"{applied} (proved)"
        return f"{meaning} (proved), as {applied}" if meaning else applied

    @property
    def is_causal(self) -> bool:
        return any(isinstance(kind, Causal) for kind in self.kinds)

    @property
    def dense(self) -> Dense | None:
        """The dense operand, if there is one (recovery combines several into one)."""
        return next((kind for kind in self.kinds if isinstance(kind, Dense)), None)


NO_MASK = MaskSpec()
