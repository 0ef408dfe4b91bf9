"""Keys that a model chooses for each query by their indices: the top k of an indexer, one by one (DeepSeek V3.2, GLM-5) or in blocks
(MiniMax M3). Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Expr


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """A query uses no key but those that a row of a tensor names. What it uses of these, the mask says as it would without that.

    tensor: the row of a query is tensor[*at, :], whole numbers from 0 on.
    at: over b, h and q.
    count: how long a row is. most: it is no longer than that, where that is known of a symbolic size.
    block: a number names so many keys, from number · block on.
    distinct: no number stands in a row twice.
    is_within: each number names keys that there are. Else one may name keys behind the last.
    condition: what of the mask says no more than that a key is in the row.
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
        """How many keys a row names at most; None where that is not known."""
        count = self.count if isinstance(self.count, int) else self.most
        return None if count is None else count * self.block


def say_all_of(rest: Expr | None, chosen: Chosen | None) -> bool:
    """Whether the chosen keys are all that a part of a mask leaves a query."""
    return rest is not None and chosen is not None and rest == chosen.condition
