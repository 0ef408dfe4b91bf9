"""Limits for reading one mask, counted and never timed: the same graph is always read the same way."""

from __future__ import annotations

from dataclasses import dataclass

#: Steps for any graph, and for each of its ops. Masks of models take less than one an op, masks made in loops up to four.
#: Repeated joins and shifts of a tensor take the square of their number
_ANYWAY, _AN_OP = 1000, 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Limits for one mask. steps: elements of tensors that are read. in_a_row: ops in a row that are read, each for the one before.

    parts: the parts of an expression; T5's buckets have 35, Swin's windows 80. depth: the nesting of parts; a spec is written and
    read by nested calls, up to five for each part.
    """

    steps: int
    in_a_row: int = 200
    parts: int = 2000
    depth: int = 100

    @classmethod
    def of_graph(cls, ops: int) -> Budget:
        """Return a budget for every mask that is made op by op. It grows linearly with the size of the graph."""
        return cls(steps=_ANYWAY + _AN_OP * ops)

    def too_large(self, parts: int, depth: int) -> str | None:
        """Return why an expression is too large; None if it is not."""
        if parts > self.parts:
            return f"would be a formula of {parts} parts, and {self.parts} are the most"
        return f"would be a formula {depth} parts deep, and {self.depth} are the most" if depth > self.depth else None
