"""What each kind of mask, choice and added score means for one pair, said by hand: a second opinion beside `condition` and `summand`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Expr
from attn_compiler.spec import masks
from attn_compiler.spec.added_scores import ProvedScore
from attn_compiler.spec.chosen_keys import Chosen
from attn_compiler.spec.masks import MaskKind


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
        known = {"Sq": self.seqlen_q, "Skv": self.seqlen_kv, **self.sizes, "b": b, "h": h, "q": q, "k": k}
        return ix.evaluate(x, known, self.load)


def allows(kind: MaskKind, b: int, h: int, q: int, k: int, inputs: Inputs) -> bool:
    """Whether the pair is allowed."""

    def value(x: Expr, key: int = k) -> Any:
        return inputs.value(x, b, h, q, key)

    match kind:
        case masks.Causal(alignment=alignment):
            from_end = alignment is masks.Alignment.BOTTOM_RIGHT
            return k <= q + (inputs.seqlen_kv - inputs.seqlen_q if from_end else 0)
        case masks.CausalFrom(offset=offset):
            return bool(k <= q + value(offset))
        case masks.SlidingWindow(left=left, right=right):
            return (left is None or q - k <= left) and (right is None or k - q <= right)
        case masks.Prefix(length=length):
            return bool(k <= q or k < value(length))
        case masks.KeyPadding(condition=condition) | masks.Formula(condition=condition):
            return bool(value(condition))
        case masks.KeyBound(side=side, bound=bound):
            return bool(k <= value(bound) if side == "last" else k >= value(bound))
        case masks.Document(of_key=of_key):
            return bool(value(of_key, key=q) == value(of_key))
        case masks.Chunked(size=size, start=start):
            return bool((q - value(start)) // size == (k - value(start)) // size)
        case masks.AnyOf(alternatives=alternatives):
            return any(all(allows(each, b, h, q, k, inputs) for each in kinds) for kinds in alternatives)
    raise NotImplementedError(type(kind).__name__)


def names(chosen: Chosen, b: int, h: int, q: int, k: int, inputs: Inputs) -> bool:
    """Whether the query's row names the key. Raises LookupError for a tensor or a size that was not given."""
    count = inputs.sizes[chosen.count] if isinstance(chosen.count, str) else chosen.count
    row = tuple(int(inputs.value(x, b, h, q, k)) for x in chosen.at)
    return any(inputs.load(chosen.tensor, (*row, place)) == k // chosen.block for place in range(count))


def adds(kind: ProvedScore, b: int, h: int, q: int, k: int, inputs: Inputs) -> float:
    """What is added to one score."""
    return float(inputs.value(kind.summand, b, h, q, k))
