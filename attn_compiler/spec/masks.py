"""The mask of an attention: `MaskSpec` is a conjunction of kinds. Pure data, no FX, no CUDA.

mask_kinds.py defines the kinds; this module re-exports them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal

from attn_compiler.spec.chosen_keys import Chosen
from attn_compiler.spec.codec import UNSAID
from attn_compiler.spec.mask_kinds import (
    KINDS as KINDS,
    SEQLEN_KV as SEQLEN_KV,
    SEQLEN_Q as SEQLEN_Q,
    Alignment as Alignment,
    AnyOf as AnyOf,
    Causal as Causal,
    CausalFrom as CausalFrom,
    Chunked as Chunked,
    Dense as Dense,
    Document as Document,
    Formula as Formula,
    KeyBound as KeyBound,
    KeyPadding as KeyPadding,
    MaskKind as MaskKind,
    Prefix as Prefix,
    SlidingWindow as SlidingWindow,
    all_of as all_of,
)


class Flag(enum.Enum):
    """Why a kernel has to apply a diagonal by itself.

    CALLED: the model's own call asks for it.
    READ: the model's tensor was read. It holds nothing else, and is not needed.
    """

    CALLED = "called"
    READ = "read"


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskSpec:
    """The allowed pairs. Empty: every pair.

    kinds: all known conditions; a pair has to be allowed by each. First the kind of the flag, then those proved for the tensor, or for the
        scores' DenseBias if there is no other tensor. Of a tensor that was read in part: some of its conditions.
    flag: why the first kind, a causal one, is to be applied by itself; None if none is.
    dense: the model's own tensor. A lowering may apply its kinds instead.
    reason: why the tensor, or a part of it, could not be read; None if it was.
    added: of a tensor that was read, why it may mask at run time.
    rest: of a tensor that was read in part, the condition that holds besides its kinds, whose tensors hold an element for each query and
        key. None if only the tensor itself holds it.
    chosen: the only keys that a query may use, by their indices. The other kinds imply it, too.
    own_rows: only the model's own code gives the result of a query without keys: "numbers" with its tensor's numbers, "model" with all of
        its code. None: graph nodes can compute it.
    means: a kernel gives a query without keys the mean of v, with the gradients that an added number leaves to q and k; else nodes do.
    out_of_reach: tensors and sizes that `kinds` read and a lowering can't get: of another graph, of one call, or overwritten by then.
    """

    kinds: tuple[MaskKind, ...] = ()
    flag: Flag | None = None
    dense: Dense | None = None
    reason: str | None = None
    out_of_reach: tuple[str, ...] = ()
    own_rows: Literal["numbers", "model"] | None = field(default=None, metadata=UNSAID)
    added: str | None = field(default=None, metadata=UNSAID)
    means: bool = field(default=False, metadata=UNSAID)
    rest: Formula | None = field(default=None, metadata=UNSAID)
    chosen: Chosen | None = field(default=None, metadata=UNSAID)

    @property
    def is_partial(self) -> bool:
        """True if the tensor also holds an unknown condition besides the kinds."""
        return self.reason is not None and bool(self.held)

    @property
    def conditions(self) -> tuple[MaskKind | Chosen, ...]:
        """All conditions that read tensors."""
        return (*self.kinds, *(each for each in (self.rest, self.chosen) if each is not None))

    @property
    def flagged(self) -> Causal | None:
        """The kind that no tensor holds."""
        first = next(iter(self.kinds), None) if self.flag is not None else None
        return first if isinstance(first, Causal) else None

    @property
    def held(self) -> tuple[MaskKind, ...]:
        """The kinds proved for a tensor."""
        return self.kinds if self.flagged is None else self.kinds[1:]

    @property
    def words(self) -> str:
        applied = " ∧ ".join(each.words for each in (self.flagged, self.dense) if each is not None)
        several = len(self.read) > 1
        meaning = " ∧ ".join(f"({x.words})" if several and isinstance(x, AnyOf) else x.words for x in self.read)
        if not meaning:
            return applied or "none"
        if meaning == applied:
            return f"{applied} (proved)"
        if self.is_partial:
            rest = "a rest" if self.rest is None else self.rest.words
            return f"{meaning} (proved) ∧ {rest}, {f'as {applied}' if applied else 'within the bias'}"
        # A mask that is proved and not applied is part of the scores' DenseBias.
        return f"{meaning} (proved){'' if applied else ', within the bias'}"

    @property
    def formula(self) -> str | None:
        """The conditions that were read, over (b, h, q, k), and "…" for the rest; None if none was, or all pairs are allowed."""
        unread = ["…" if self.rest is None else self.rest.formula] if self.is_partial else []
        return " ∧ ".join([*(kind.formula for kind in self.read), *unread]) or None

    @property
    def is_causal(self) -> bool:
        return self.flagged is not None

    @property
    def read(self) -> tuple[MaskKind, ...]:
        """The kinds that were read from the model's graph."""
        return self.kinds if self.flag is Flag.READ else self.held
