"""What a mask depends on besides the pair: sizes, and elements of run-time tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Expr


def _no_tensor(tensor: str, at: tuple[int, ...]) -> Any:
    raise LookupError(f"the mask reads {tensor}{list(at)}, and no run-time tensors were given")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a mask depends on besides the pair.

    seqlen_q, seqlen_kv: sizes of the scores. load(tensor, indices): an element of a run-time tensor. sizes: every symbolic size
    that the mask's expressions name.
    """

    seqlen_q: int
    seqlen_kv: int
    load: Callable[[str, tuple[int, ...]], Any] = _no_tensor
    sizes: Mapping[str, int] = field(default_factory=dict)

    def value(self, x: Expr, b: int, h: int, q: int, k: int) -> Any:
        """An index expression's value for one pair. Raises LookupError for a tensor or a size that was not given."""
        return ix.evaluate(x, {**self.sizes, "b": b, "h": h, "q": q, "k": k}, self.load)
