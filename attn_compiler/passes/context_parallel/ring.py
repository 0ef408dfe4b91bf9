"""Keys and values of one rank at a time: in each of n steps every rank gets those of one rank, and attends to them.

At first each rank splits its own and gives every rank a slice, in one exchange. From then on each step is an all-gather of the slices of
one rank's keys and values, which is the same step on all ranks. So no graph holds a rank, positions of keys are known numbers, and the
gradients of a step are summed by a reduce-scatter. The next step's gather begins before this step's attention. The backward gathers again.
Results are merged by their logsumexp (merging.py).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.context_parallel import collectives as torch_collectives
from attn_compiler.lowerings.graph_ops.lse_op import attention_with_lse
from attn_compiler.lowerings.graph_ops.merging import merged_parts, whole_of_parts
from attn_compiler.passes.context_parallel import sites
from attn_compiler.passes.context_parallel.exchanging import GraphLayout, Met, PairPlaces
from attn_compiler.passes.context_parallel.sites import PlacedScores, RewrittenSite
from attn_compiler.passes.context_parallel.whole import Wholes
from attn_compiler.passes.graph import program
from attn_compiler.passes.graph.emit import GraphBuilder
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Site
from attn_compiler.passes.recovering import recover
from attn_compiler.spec.attention import AttentionSpec


def rewrite(
    mirror: Mirror, site: Site, builder: GraphBuilder, layout: GraphLayout, wholes: Wholes
) -> tuple[fx.Node, RewrittenSite]:
    """Rewrite a site as `sites.rewrite`, by this method."""
    spec = site.spec
    if spec is None:
        raise ValueError(f"the site at {site.module} has no spec")
    tensors = program.build(mirror, site.match, builder, recover.compute_dtype(site.match))
    slices = _Slices.exchanged(builder, layout, tensors.k, tensors.v)
    merge = _Merge(builder=builder)
    parts = 0
    # If no score depends on positions, a rank's two chunks are one part.
    is_whole = sites.allowed(site, spec) == ix.TRUE and not spec.score.proved
    coming = slices.gathered(0)
    for step in range(layout.size):
        keys, values = coming
        if step + 1 < layout.size:
            coming = slices.gathered(step + 1)
        for first, start, count in _ranges(layout, sites.rank_length(spec), step, is_whole=is_whole):
            k, v = keys, values
            if builder.value(k).shape[2] != count:
                k, v = (builder.call(torch.narrow, x, 2, start, count) for x in (keys, values))
            met = _met(builder, layout, tensors.q, k, v, first)
            scores = PlacedScores(site=site, spec=spec, builder=builder, met=met, wholes=wholes, size=layout.size)
            merge.add(_part(builder, spec, met, scores))
            parts += 1
    out = merge.whole(tensors.sinks, builder.value(tensors.q).dtype, builder.value(tensors.v).dtype)
    return out, RewrittenSite(method="ring", bytes=slices.bytes, parts=parts)


def _ranges(layout: GraphLayout, length: int, owner: int, *, is_whole: bool) -> Iterator[tuple[int, int, int]]:
    """Yield a rank's ranges of keys that are contiguous in the sequence: the first one's position, its index among the keys, the count."""
    if is_whole or not layout.is_balanced:
        yield owner * length, 0, length
        return
    half = length // 2
    for place, chunk in enumerate((owner, 2 * layout.size - 1 - owner)):
        yield chunk * half, place * half, half


def _met(builder: GraphBuilder, layout: GraphLayout, q: fx.Node, k: fx.Node, v: fx.Node, first: int) -> Met:
    """Return the operands of a step. first: the position of the first key."""
    call, value = builder.call, builder.value(q)
    device, rows, count = value.device, int(value.shape[0]), int(builder.value(k).shape[2])
    queries = layout.positions(builder, int(value.shape[2]), device)

    def along(start: int, count: int, *shape: int) -> fx.Node:
        key = ("counted", start, count, shape, device)
        made = builder.once(key, lambda: call(torch.arange, start, start + count, device=device))
        return builder.once((*key, "seen"), lambda: call(torch.Tensor.view, made, shape))

    of_q = builder.once(("of queries", queries), lambda: call(torch.Tensor.view, queries, (1, 1, -1, 1)))
    places = PairPlaces(b=along(0, rows, -1, 1, 1, 1), q=of_q, k=along(first, count, 1, 1, 1, -1), inside=None)
    return Met(q=q, k=k, v=v, queries=queries, first_head=None, bytes=0, places=places)


def _part(builder: GraphBuilder, spec: AttentionSpec, met: Met, scores: PlacedScores) -> tuple[fx.Node, fx.Node]:
    """Return the output and the lse of a part. Sinks come in once, at the end of the merge."""
    both = builder.call(
        attention_with_lse,
        *(met.q, met.k, met.v, sites.joined(builder, scores, builder.value(met.q).dtype)),
        scale=spec.score.scale,
        softcap=spec.score.softcap,
        is_part=True,
    )
    return builder.call(operator.getitem, both, 0), builder.call(operator.getitem, both, 1)


@dataclass(kw_only=True)
class _Merge:
    """The merge so far: its output in float32 (float64 for float64), and its lse."""

    builder: GraphBuilder
    acc: fx.Node | None = None
    lse: fx.Node | None = None

    def add(self, part: tuple[fx.Node, fx.Node]) -> None:
        call = self.builder.call
        out, lse = part
        if self.acc is None or self.lse is None:
            wide = torch.promote_types(self.builder.value(out).dtype, torch.float32)
            self.acc, self.lse = program.cast(self.builder, out, wide), lse
            return
        both = call(merged_parts, self.acc, self.lse, out, lse)
        self.acc, self.lse = call(operator.getitem, both, 0), call(operator.getitem, both, 1)

    def whole(self, sinks: fx.Node | None, of_scores: torch.dtype, dtype: torch.dtype) -> fx.Node:
        """Return the output. of_scores: the dtype in which sinks join the scores."""
        column = None if sinks is None else program.cast(self.builder, sinks, of_scores)
        return self.builder.call(whole_of_parts, self.acc, self.lse, column, dtype)


@dataclass(frozen=True, kw_only=True)
class _Slices:
    """A rank's slices of the keys and values of all ranks.

    apart: for k and v, or for both side by side, a slice of each rank's, by rank. shapes: of a rank's own tensors. bytes: that a rank
    sends in the forward.
    """

    builder: GraphBuilder
    layout: GraphLayout
    apart: Sequence[Sequence[fx.Node]]
    shapes: Sequence[torch.Size]
    widths: tuple[int, int]
    bytes: int

    @staticmethod
    def exchanged(builder: GraphBuilder, layout: GraphLayout, k: fx.Node, v: fx.Node) -> _Slices:
        call, value = builder.call, builder.value
        widths = (int(value(k).shape[3]), int(value(v).shape[3]))
        own = [call(torch.cat, (k, v), 3)] if value(k).dtype == value(v).dtype else [k, v]
        apart, sent = [], 0
        for x in own:
            flat = call(torch.flatten, x)
            lacking = -value(flat).shape[0] % layout.size
            flat = call(torch.nn.functional.pad, flat, (0, lacking)) if lacking else flat
            to_ranks = call(torch.unflatten, flat, 0, (layout.size, -1))
            come = call(torch_collectives.exchanged_pieces, to_ranks, layout.group)
            by_rank = call(torch.unbind, come)
            apart.append([call(operator.getitem, by_rank, rank) for rank in range(layout.size)])
            # A rank sends its slices in the exchange, and then in each step one slice to all others.
            one = int(value(flat).numel()) * value(flat).element_size() // layout.size
            sent += (layout.size - 1) * one * (1 + layout.size)
        shapes = [value(x).shape for x in own]
        return _Slices(builder=builder, layout=layout, apart=apart, shapes=shapes, widths=widths, bytes=sent)

    def gathered(self, owner: int) -> tuple[fx.Node, fx.Node]:
        call = self.builder.call
        found = []
        for apart, shape in zip(self.apart, self.shapes, strict=True):
            flat = call(torch_collectives.gathered_piece, apart[owner], self.layout.size, self.layout.group)
            count = shape.numel()
            flat = call(torch.narrow, flat, 0, 0, count) if self.builder.value(flat).shape[0] != count else flat
            found.append(call(torch.Tensor.view, flat, tuple(shape)))
        if len(found) == 2:
            return found[0], found[1]
        of_k, of_v = self.widths
        return call(torch.narrow, found[0], 3, 0, of_k), call(torch.narrow, found[0], 3, of_k, of_v)
