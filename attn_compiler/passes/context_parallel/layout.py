"""The layout of a sequence on the ranks, as nodes: positions, and the whole of a tensor of which each rank has a part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from attn_compiler.context_parallel import collectives as torch_collectives
from attn_compiler.passes.graph.emit import GraphBuilder


@dataclass(frozen=True, kw_only=True)
class GraphLayout:
    """A layout. size: ranks. group: the name of their process group.

    is_balanced: each rank has one chunk from the front of the sequence and one from its back, of 2 · size; else one piece.
    """

    size: int
    group: str
    is_balanced: bool

    def rank(self, builder: GraphBuilder, device: torch.device) -> fx.Node:
        """Return the rank, () int64, a run-time number: no graph holds it, so the ranks' graphs are equal."""

        def make() -> fx.Node:
            like = builder.call(torch.zeros, (), dtype=torch.int64, device=device)
            # The rank has 32 bits, which proves that no position wraps around.
            rank = builder.call(torch_collectives.sequence_rank, like, self.group)
            return builder.call(torch.Tensor.to, rank, torch.int64)

        return builder.once(("sequence rank", self, device), make)

    def positions(self, builder: GraphBuilder, length: int, device: torch.device) -> fx.Node:
        """Return (length,) int64, the position of each of this rank's elements in the whole sequence."""
        return builder.once(("positions", self, length, device), lambda: self._positions(builder, length, device))

    def _positions(self, builder: GraphBuilder, length: int, device: torch.device) -> fx.Node:
        own = builder.call(torch.arange, length, device=device)
        rank = self.rank(builder, device)
        if not self.is_balanced:
            return builder.call(torch.add, own, builder.call(torch.mul, rank, length))
        half = length // 2
        front = builder.call(torch.add, own, builder.call(torch.mul, rank, half))
        # The second chunk is the (2 · size - 1 - rank)th, and this rank has `half` positions before it.
        after = builder.call(torch.add, builder.call(torch.mul, rank, -half), (2 * self.size - 2) * half)
        back = builder.call(torch.add, own, after)
        return builder.call(torch.where, builder.call(torch.lt, own, half), front, back)

    def gathered(self, builder: GraphBuilder, x: fx.Node, axis: int) -> fx.Node:
        """Gather the parts of all ranks, in the order of the sequence along the axis."""
        return builder.call(torch_collectives.gathered_sequence, x, axis, self.size, self.is_balanced, self.group)

    def to_heads(self, builder: GraphBuilder, x: fx.Node) -> fx.Node:
        """Exchange (B, H, n, D) for (B, H / size, size · n, D)."""
        return builder.call(torch_collectives.heads_for_positions, x, self.size, self.is_balanced, self.group)

    def to_positions(self, builder: GraphBuilder, x: fx.Node) -> fx.Node:
        """Invert `to_heads`."""
        return builder.call(torch_collectives.positions_for_heads, x, self.size, self.is_balanced, self.group)
