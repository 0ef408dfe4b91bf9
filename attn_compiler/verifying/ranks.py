"""Verification on ranks that share a sequence: this rank's rows beside those of the attention over the whole sequence.

The recovered attention (`AsRead`) gives, on the rank's own part, the same as the model's own operations. And the rewritten graph gives this
rank the same as that attention with the keys of all ranks, at this rank's positions. `Layout` gives the positions of each rank; the checked
nodes themselves are not used.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.context_parallel import collectives as torch_collectives, rank_sync
from attn_compiler.context_parallel.layout import Layout
from attn_compiler.index_expr import Expr, Index
from attn_compiler.lowerings import score_changes
from attn_compiler.passes.context_parallel.first_look import FirstLook
from attn_compiler.passes.graph import program
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.passes.graph.site import Site
from attn_compiler.passes.recovering import recover
from attn_compiler.reasons.errors import VerificationMismatch, described
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.numerics import exact_dtype
from attn_compiler.verifying import outputs, pairs
from attn_compiler.verifying.comparing import Compared
from attn_compiler.verifying.interpreting import Noise
from attn_compiler.verifying.outputs import OutputCheck, RealBuilder
from attn_compiler.verifying.pairs import Slice
from attn_compiler.verifying.values import Body, Key, NoValueError, Values

#: seconds to wait for a rank: it may still compile
_PATIENCE = 900.0


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """layout: of the sequence. rank: of this process. group: the name of their process group. beside: the groups that share heads with this
    rank. has_whole: each rank runs the model's own graph by itself."""

    layout: Layout
    rank: int
    group: str
    beside: tuple[str, ...] = ()
    has_whole: bool = False

    @staticmethod
    def from_look(look: FirstLook) -> Ranks:
        """Return the ranks that share a graph's sequence."""
        cp = look.cp
        layout = Layout(size=cp.size, balanced=cp.is_balanced)
        return Ranks(layout=layout, rank=cp.rank, group=cp.group_name, beside=look.beside, has_whole=look.has_whole)

    def whole(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        """Gather the parts of all ranks, in the order of the sequence along the axis. Every rank has to call it."""
        by_rank, length = torch_collectives.parts(x, self.layout.size, self.group), x.shape[axis]
        found = x.new_empty([*x.shape[:axis], length * self.layout.size, *x.shape[axis + 1 :]])
        for rank, part in enumerate(by_rank):
            found.index_copy_(axis, self.layout.positions(length, rank, x.device), part)
        return found

    def meet(self, subject: str) -> None:
        """Wait for all ranks before a step of all of them. Raises RanksDisagree if one has failed."""
        rank_sync.agree(self.group, subject, f"at {subject}", seconds=_PATIENCE)

    def failed(self, error: Exception) -> None:
        """Tell the waiting ranks that this one will not come."""
        groups = self.beside if isinstance(error, rank_sync.RanksDisagree) else (self.group, *self.beside)
        for group in groups:
            rank_sync.send(group, f"failed: {described(error)}")

    def raise_first(self, found: Sequence[tuple[int, VerificationMismatch]]) -> None:
        """Raise on every rank the first mismatch of any rank, with a note that names the others. found: this rank's, each with the place of
        its check in the plan. Raises RanksDisagree if the check of one failed."""
        every = [(place, self.rank, mismatch.fields()) for place, mismatch in found]
        for group in (self.group, *self.beside):
            by_rank = rank_sync.answers(group, "what was found", json.dumps(every), seconds=_PATIENCE)
            lost = [f"rank {rank}: {text}" for rank, text in enumerate(by_rank) if not text.startswith("[")]
            if lost:
                raise rank_sync.RanksDisagree("; ".join(lost))
            every = [tuple(one) for text in by_rank for one in json.loads(text)]
        if not every:
            return
        (_, rank, first), *others = sorted(every, key=lambda one: one[:2])
        index = f"{first['index']} on rank {rank}"
        mismatch = VerificationMismatch(**{**first, "index": index, "until": "compile without context_parallel"})
        for _, rank, other in others:
            mismatch.add_note(f"also: the {other['what']} at {other['site']}, {other['index']} on rank {rank}")
        raise mismatch


@dataclass(kw_only=True, eq=False)
class WholeLoads:
    """Loads of masks and biases for the whole sequence, computed by the model's own nodes from the inputs of all ranks. nodes: of the
    model's own graph, by name. axes: for each input with a part of the sequence, the axis of positions."""

    body: Body
    nodes: Mapping[str, fx.Node]
    axes: Mapping[str, int]
    _shared: dict[fx.Node, bool] = field(default_factory=dict)

    def value(self, version: Version, values: Values, ranks: Ranks) -> torch.Tensor:
        """Return the whole tensor. Every rank has to call it. Raises NoValueError."""
        mirror = self.body.mirror
        dynamo = mirror.dynamo_node(version.node) if version.node.graph is mirror.graph else None
        if dynamo is None or dynamo.name not in self.nodes:
            raise NoValueError(f"{version.node.name} is not in the model's own graph")
        node = self.nodes[dynamo.name]
        if not self._is_shared(node):
            return values.at(version)

        @functools.cache
        def made(one: fx.Node) -> Any:
            if self._is_shared(one) and one.name not in self.axes:
                return values.call(one, made)
            x = values.read(Key(self.body.index, one.name))
            is_part = one.name in self.axes and values.asked is None
            return ranks.whole(x, self.axes[one.name]) if is_part else x

        x = made(node)
        if not isinstance(x, torch.Tensor):
            raise NoValueError(f"{node.name} is no tensor")
        return x

    def _is_shared(self, node: fx.Node) -> bool:
        """Return True if a node depends on an input that ranks have parts of."""
        if node not in self._shared:
            self._shared[node] = node.name in self.axes or any(map(self._is_shared, node.all_input_nodes))
        return self._shared[node]


@dataclass(kw_only=True, eq=False)
class SharedCheck(OutputCheck):
    """An output whose keys are on several ranks. whole: makes the loads of its mask and biases. Every rank has to compare."""

    spec: AttentionSpec
    new_out: fx.Node
    whole: WholeLoads
    ranks: Ranks

    @property
    def is_as_it_was(self) -> bool:
        return False

    def read(self, values: Values) -> None:
        match = self.site.match
        self.read_own(values)
        values.rewritten(self.body, self.new_out)
        for node in (*program.sources(match), *(factor.node for factor in match.scores.factors)):
            values.mirror(node)
        for known in self._loads():
            for version in known.values():
                self.whole.value(version, values, self.ranks)
                values.at(version)

    def _loads(self) -> tuple[dict[str, Version], dict[str, Version]]:
        """Return the loads of the mask, and of the biases."""
        site, biases = self.site, {name for kind in self.spec.score.proved for name in kind.summand.facts.tensors}
        masks = allowed(site, self.spec).facts.tensors
        return {x: site.loads[x] for x in sorted(masks)}, {x: site.score_loads[x] for x in sorted(biases)}

    def compare(self, values: Values) -> Compared:
        site, ranks = self.site, self.ranks
        ranks.meet(f"the attention of {site.module}")
        # Steps that wait for other ranks come first: later findings are this rank's own.
        new, models = (outputs.comparable(values.rewritten(self.body, self.new_out)), values.mirror(site.match.out))
        own = self._on_part(values)
        k, v = (ranks.whole(x, 2) for x in (own.k, own.v))
        loads, score_loads = ({x: self.whole.value(y, values, ranks) for x, y in z.items()} for z in self._loads())
        positions = ranks.layout.positions(own.q.shape[2], ranks.rank, own.q.device)
        whole = dataclasses.replace(own, k=k, v=v, positions=positions, loads=loads, score_loads=score_loads)

        def restored(x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = program.restore(site.match, RealBuilder(values), x)
            return found

        kept, of_part = self.kept_rows(values), restored(own.run()).to(models.dtype)
        self.beside_own(of_part, values, kept, "attention as it was read")
        out = restored(whole.run()).to(models.dtype)
        found = self.held(
            new,
            out,
            lambda noise: restored(whole.run(exact_dtype(out.dtype), noise)),
            v,
            self.spread(whole.rows(), values),
            f"{self.what} over the whole sequence",
            ix.text(allowed(site, self.spec)),
        )
        # Later nodes get the attention over the whole sequence, and not that over this rank's part.
        return dataclasses.replace(found, instead=models.clone().copy_(out))

    def _on_part(self, values: Values) -> AsRead:
        """Return the attention on this rank's part alone, as the model's own graph computes it."""
        mirror, match = self.body.mirror, self.site.match
        x = program.build(mirror, match, RealBuilder(values), recover.compute_dtype(match))
        loads, score_loads = ({x: values.at(y) for x, y in known.items()} for known in self._loads())
        given = {"q": x.q, "k": x.k, "v": x.v, "sinks": x.sinks, "loads": loads, "score_loads": score_loads}
        positions = torch.arange(x.q.shape[2], device=x.q.device)
        return AsRead(site=self.site, spec=self.spec, values=values, positions=positions, **given)


def allowed(site: Site, spec: AttentionSpec) -> Expr:
    """Return the condition that allows a pair."""
    causal = ix.compare("<=", Index("k"), Index("q")) if spec.mask.is_causal else ix.TRUE
    return ix.apply("and", site.condition or ix.TRUE, causal)


@dataclass(frozen=True, kw_only=True, eq=False)
class AsRead:
    """An attention as it was recovered from the model, computed pair by pair in any dtype: products and a softmax.

    q (B, H, Q, D), k and v (B, Hkv, N, ·), sinks (H,). positions: of the queries, (Q,). loads, score_loads: tensors read by the mask and
    the biases.
    """

    site: Site
    spec: AttentionSpec
    values: Values
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None
    positions: torch.Tensor
    loads: Mapping[str, torch.Tensor]
    score_loads: Mapping[str, torch.Tensor]

    def run(self, dtype: torch.dtype | None = None, noise: Noise | None = None) -> torch.Tensor:
        """Return (B, H, Q, Dv). dtype: of every step; None: the model's own. noise: on every step."""
        wide = dtype or torch.promote_types(self.q.dtype, self.v.dtype)
        out = self.q.new_empty((*self.q.shape[:3], self.v.shape[3]), dtype=wide)
        with torch.no_grad(), torch.autocast(self.q.device.type, enabled=False):
            for at in self._slices():
                out[at.b, at.h, at.first : at.end] = self._slice(at, dtype, noise)
        return out

    def rows(self) -> torch.Tensor:
        """Return the rows that have any key: (B, H, Q, 1)."""
        found = self.q.new_ones((*self.q.shape[:3], 1), dtype=torch.bool)
        if allowed(self.site, self.spec) != ix.TRUE:
            for at in self._slices():
                found[at.b, at.h, at.first : at.end] = self._kept(at).any(-1, keepdim=True)
        return found

    def _slices(self) -> Iterator[Slice]:
        return pairs.slices((*self.q.shape[:3], self.k.shape[2]))

    def _kept(self, at: Slice) -> torch.Tensor:
        found = self._evaluated(allowed(self.site, self.spec), at, self.loads)
        return found.expand(at.end - at.first, self.k.shape[2])

    def _evaluated(self, x: Expr, at: Slice, loads: Mapping[str, torch.Tensor]) -> torch.Tensor:
        keys, device = self.k.shape[2], self.q.device
        try:
            return pairs.evaluated(x, at, keys, self.values, loads, device, positions=self.positions)
        except (IndexError, ZeroDivisionError) as error:
            raise NoValueError(f"{ix.text(x, 80)} has no value for the whole sequence: {error}") from error

    def _slice(self, at: Slice, dtype: torch.dtype | None, noise: Noise | None) -> torch.Tensor:
        own, of_v, score = self.q.dtype, self.v.dtype, self.spec.score
        narrow, last = dtype or own, dtype or torch.promote_types(own, of_v)

        def step(x: torch.Tensor, rounded: torch.dtype = own) -> torch.Tensor:
            return x if noise is None else noise.on(x, rounded)

        of_head = at.h // (self.q.shape[1] // self.k.shape[1])
        q = self.q[at.b, at.h, at.first : at.end].to(narrow)
        scores = step(step(q @ self.k[at.b, of_head].to(narrow).T) * score.scale)
        scores = score_changes.applied(lambda function, *given: step(function(*given)), scores, score.pointwise)
        for kind in score.proved:
            scores = step(scores + step(self._evaluated(kind.summand, at, self.score_loads).to(narrow)))
        kept = self._kept(at)
        scores = scores.masked_fill(~kept, -torch.inf).to(dtype or torch.promote_types(own, torch.float32))
        if self.sinks is not None:
            column = self.sinks[at.h].to(own).to(scores.dtype).expand(scores.shape[0], 1)
            scores = torch.cat((scores, column), -1)
        weights = step(scores.softmax(-1)[:, : kept.shape[1]])
        weights = torch.where(kept.any(-1, keepdim=True), weights, 0.0).to(last)
        return step(weights @ self.v[at.b, of_head].to(last), last if dtype is None else of_v)
