"""Layouts of a sequence on the ranks, as nodes. Two ways for q to meet keys of other ranks: k and v are gathered, or heads exchanged."""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass(frozen=True, kw_only=True)
class PairPlaces:
    """The model's indices of pairs, int64 nodes that broadcast to (B, H, Q, N). q, k: positions of the whole sequence. b: batch rows.

    inside: truth values, which keys are positions of the sequence; None: all are. No other mask hides keys outside, which hold zeros.
    """

    b: fx.Node
    q: fx.Node
    k: fx.Node
    inside: fx.Node | None


@dataclass(frozen=True, kw_only=True)
class Met:
    """The operands of a rank's attention: q (B, H, Q, D), k and v (B, Hkv, N, ·), N the length of the whole sequence.

    queries: (Q,) int64, the position of each query in the whole sequence. first_head: (), int64, the model's index of the first head here;
    None: the rank has all heads. bytes: that the rank sends in the forward.
    places: the model's indices, where batch rows, queries and keys are others here. Then N is the number of the rank's keys.
    """

    q: fx.Node
    k: fx.Node
    v: fx.Node
    queries: fx.Node
    first_head: fx.Node | None
    bytes: int
    places: PairPlaces | None = None


def gather(builder: GraphBuilder, layout: GraphLayout, q: fx.Node, k: fx.Node, v: fx.Node) -> Met:
    """Gather all keys and values to each rank's queries, in one collective where they are of one dtype."""
    value = builder.value
    if value(k).dtype == value(v).dtype:
        both = layout.gathered(builder, builder.call(torch.cat, (k, v), 3), 2)
        of_k, of_v = value(k).shape[3], value(v).shape[3]
        keys = builder.call(torch.narrow, both, 3, 0, of_k)
        values = builder.call(torch.narrow, both, 3, of_k, of_v)
    else:
        keys, values = (layout.gathered(builder, x, 2) for x in (k, v))
    queries = layout.positions(builder, int(value(q).shape[2]), value(q).device)
    sent = (layout.size - 1) * sum(_bytes(value(x)) for x in (k, v))
    return Met(q=q, k=keys, v=values, queries=queries, first_head=None, bytes=sent)


def exchange(builder: GraphBuilder, layout: GraphLayout, q: fx.Node, k: fx.Node, v: fx.Node) -> Met:
    """Give each rank all positions of its share of the heads, in one collective where q, k and v are alike."""
    value = builder.value
    whole: list[fx.Node] = []
    for group in _alike(builder, (q, k, v)):
        by_rank = [builder.call(torch.unflatten, x, 1, (layout.size, -1)) for x in group]
        sent = (
            builder.call(torch.flatten, builder.call(torch.cat, tuple(by_rank), 2), 1, 2)
            if len(group) > 1
            else group[0]
        )
        found, first = layout.to_heads(builder, sent), 0
        for x in group:
            heads = int(value(x).shape[1]) // layout.size
            whole.append(builder.call(torch.narrow, found, 1, first, heads))
            first += heads
    device = value(q).device
    length, heads = int(value(whole[0]).shape[2]), int(value(whole[0]).shape[1])
    queries = builder.once(("all positions", length, device), lambda: builder.call(torch.arange, length, device=device))
    first_head = builder.call(torch.mul, layout.rank(builder, device), heads)
    sent_bytes = sum(_bytes(value(x)) for x in (q, k, v, q)) * (layout.size - 1) // layout.size
    return Met(q=whole[0], k=whole[1], v=whole[2], queries=queries, first_head=first_head, bytes=sent_bytes)


def _alike(builder: GraphBuilder, operands: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Group neighbours of one dtype and head dim, which travel together."""
    groups: list[list[fx.Node]] = []
    for x in operands:
        value = builder.value(x)
        last = builder.value(groups[-1][-1]) if groups else None
        if last is not None and (last.dtype, last.shape[-1]) == (value.dtype, value.shape[-1]):
            groups[-1].append(x)
        else:
            groups.append([x])
    return groups


def _bytes(value: torch.Tensor) -> int:
    return int(value.numel()) * value.element_size()
