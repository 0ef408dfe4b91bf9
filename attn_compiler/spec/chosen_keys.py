"""Keys chosen by index for each query: the top k of an indexer, one by one (DeepSeek V3.2, GLM-5) or in blocks (MiniMax M3).

Pure data.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Expr


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The keys that a query may use: those in a row of a tensor. The mask applies to these keys as usual.

    tensor: the row of a query is tensor[*at, :], integers from 0 on.
    at: over b, h and q.
    count: the length of a row. most: an upper bound of a symbolic count, if known.
    block: a number n names the keys from n · block on, `block` of them.
    distinct: no number occurs twice in a row.
    is_within: each number names existing keys. Else one may name keys behind the last.
    condition: the part of the mask that says only that a key is in the row.
    """

    tensor: str
    at: tuple[Expr, ...]
    count: int | str
    distinct: bool
    condition: Expr
    block: int = 1
    is_within: bool = True
    most: int | None = None

    @property
    def words(self) -> str:
        blocks = f", in blocks of {self.block}" if self.block > 1 else ""
        return f"{self.tensor}[{', '.join([*map(ix.text, self.at), ':'])}]{blocks}"

    @property
    def keys(self) -> int | None:
        """The most keys that a row names; None if unknown."""
        count = self.count if isinstance(self.count, int) else self.most
        return None if count is None else count * self.block


def say_all_of(rest: Expr | None, chosen: Chosen | None) -> bool:
    """Return True if the chosen keys are all that a part of a mask leaves a query."""
    return rest is not None and chosen is not None and rest == chosen.condition
