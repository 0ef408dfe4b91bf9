"""Keys that a model chooses for each query by their indices: the top k of an indexer (DeepSeek V3.2, GLM-5). Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Expr
from attn_compiler.spec.mask_inputs import Inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """A query uses no key but those that a row of a tensor names. What it uses of these, the mask says as it would without that.

    tensor: the row of a query is tensor[*at, :], whole numbers from 0 to below the number of keys.
    at: over b, h and q.
    count: how long a row is.
    distinct: no key stands in a row twice.
    condition: what of the mask says no more than that a key is in the row.
    """

    tensor: str
    at: tuple[Expr, ...]
    count: int | str
    distinct: bool
    condition: Expr

    @property
    def words(self) -> str:
        return f"{self.tensor}[{', '.join([*map(ix.text, self.at), ':'])}]"

    def has(self, b: int, h: int, q: int, k: int, inputs: Inputs) -> bool:
        """Whether the query's row names the key. Raises LookupError for a tensor or a size that was not given."""
        count = inputs.sizes[self.count] if isinstance(self.count, str) else self.count
        row = tuple(int(inputs.value(x, b, h, q, k)) for x in self.at)
        return any(inputs.load(self.tensor, (*row, place)) == k for place in range(count))
