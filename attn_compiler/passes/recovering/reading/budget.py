"""How much may be read for one mask, counted and never timed: the same graph is always read the same way."""

from __future__ import annotations

from dataclasses import dataclass

#: Steps for any graph, and for each of its ops. Masks of models take less than one an op, those that are made in loops up to four;
#: what joins and shifts a tensor again and again takes the square of how often
_ANYWAY, _AN_OP = 1000, 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """steps: elements of tensors that are looked into for one mask. in_a_row: ops that are read because of each other.

    parts: of an expression; T5's buckets have 35, Swin's windows 80. depth: of parts that stand in each other; a spec is written and
    read by calls that stand in each other, up to five for each.
    """

    steps: int
    in_a_row: int = 200
    parts: int = 2000
    depth: int = 100

    @classmethod
    def of_graph(cls, ops: int) -> Budget:
        """Enough for every mask that is made op by op, and no more than so many times the size of the graph."""
        return cls(steps=_ANYWAY + _AN_OP * ops)

    def too_large(self, parts: int, depth: int) -> str | None:
        """Why an expression is not gone on with."""
        if parts > self.parts:
            return f"would be a formula of {parts} parts, and {self.parts} are the most"
        return f"would be a formula {depth} parts deep, and {self.depth} are the most" if depth > self.depth else None
