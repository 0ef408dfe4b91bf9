"""One attention, from the rank's own positions to those of the whole sequence, as plain PyTorch calls that are matched and proved again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.context_parallel.halo import Halo
from attn_compiler.index_expr import Apply, Const, Expr, Index, Test, on_nodes
from attn_compiler.index_expr.changing import throughout
from attn_compiler.index_expr.on_nodes import Names
from attn_compiler.passes.context_parallel import exchanging, halo
from attn_compiler.passes.context_parallel.exchanging import GraphLayout, Met
from attn_compiler.passes.context_parallel.numbers import IF_CHANCE, check_numbers, check_rounding, is_of_length
from attn_compiler.passes.context_parallel.places import CannotShard
from attn_compiler.passes.context_parallel.whole import Wholes
from attn_compiler.passes.graph import axes, program
from attn_compiler.passes.graph.emit import GraphBuilder
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.passes.graph.site import Site
from attn_compiler.passes.recovering import elements, keyless, recover
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.dtypes import computed_in
from attn_compiler.spec.scores import DenseBias, Sinks, Softcap

#: the number of ranks' parts of keys that a rank keeps in a ring
_OF_RING = 3


@dataclass(frozen=True, kw_only=True)
class RewrittenSite:
    """The outcome for one site. method: "all_gather", "all_to_all" or "ring". bytes: that a rank sends in the forward.

    halo: in words, where one is exchanged and nothing is gathered. parts: attentions that are merged. why: the reason of "auto" for the
    method, where the method does not show it. leaves_zero: a query without keys gives 0, where the model gives a mean over the whole
    sequence.
    """

    method: str
    bytes: int
    halo: str | None = None
    parts: int = 1
    why: str | None = None
    leaves_zero: bool = False

    @property
    def words(self) -> str:
        """Return how queries meet keys, for reports."""
        how = self.halo or self.method
        return f"{how}; queries without keys give 0, and not the mean of all ranks' v" if self.leaves_zero else how


def check_shareable(site: Site, spec: AttentionSpec) -> None:
    """Raise CannotShard for an attention that is not fully understood, or can't be computed over the whole sequence."""
    at = site.match.out
    rule = "an attention over parts of a sequence is understood in full"
    if spec.mask.reason is not None:
        remedy = "compile the whole model in one graph, with attention_mask (batch, positions) or none, and not a mask of pairs"
        raise CannotShard(rule, f"the mask was not understood: {spec.mask.reason}", at=at, remedy=remedy)
    unknown = [change.words for change in spec.score.changes if not isinstance(change, (Softcap, Sinks, DenseBias))]
    if unknown or (spec.score.bias is not None and not spec.score.proved):
        raise CannotShard(rule, f"the scores are changed: {spec.score.words}", at=at)
    if site.match.scores.limits:
        raise CannotShard(rule, "scores are clamped", at=at)
    if spec.score.by_highest:
        raise CannotShard(rule, f"of all ranks' keys the highest count: {spec.score.added}", at=at)
    if spec.score.dropout_p:
        remedy = "set the model's attention dropout to 0"
        raise CannotShard("no weights are dropped", f"dropout {spec.score.dropout_p:g}", at=at, remedy=remedy)
    if spec.returns_weights:
        remedy = "call the model without output_attentions"
        raise CannotShard("nothing but the product with v reads the weights", "they are read", at=at, remedy=remedy)
    if keyless.shuts_queries_out(site.keyless):
        raise CannotShard(rule, "queries that a mask shuts out get the mean of v", at=at)
    if spec.stored is not None or spec.seqlen_q != spec.seqlen_kv:
        remedy = "call the model with use_cache=False; what every rank has as a whole is named in ContextParallel(replicated=...)"
        observed = f"{spec.seqlen_q} queries and {spec.seqlen_kv} keys"
        raise CannotShard("queries and keys are parts of one sequence", observed, at=at, remedy=remedy)
    sizes = [x for tensor in (spec.q, spec.k, spec.v) for x in tensor.shape if not isinstance(x, int)]
    if sizes:
        raise CannotShard(
            "sizes are known when the graph is compiled", f"{sizes[0]}", at=at, remedy="compile with dynamic=False"
        )


def check_scale(site: Site, spec: AttentionSpec) -> None:
    """Raise CannotShard for a scale that may come from the rank's own length."""
    length = int(axes.dim_size(site.match.axes.query))
    width = spec.q.shape[-1]
    wide = math.sqrt(width) if isinstance(width, int) else 1.0
    if any(is_of_length(spec.score.scale * factor, length) for factor in (1.0, wide)):
        raise CannotShard(
            "the scale of scores does not depend on how many positions a rank has",
            f"{spec.score.scale:g}, and a rank has {length} positions",
            at=site.match.out,
            remedy=IF_CHANCE,
        )


def rewrite(
    mirror: Mirror, site: Site, builder: GraphBuilder, layout: GraphLayout, wholes: Wholes, method: str
) -> tuple[fx.Node, RewrittenSite]:
    """Emit the replacement of the site's output. To be called inside of `builder.at`. Raises CannotShard."""
    spec = site.spec
    if spec is None:
        raise ValueError(f"the site at {site.module} has no spec")
    tensors = program.build(mirror, site.match, builder, recover.compute_dtype(site.match))
    near = halo_of(site, spec, layout, method)
    operands = (tensors.q, tensors.k, tensors.v)
    if near is not None:
        met = halo.meet(builder, layout, near, *operands)
    else:
        meet = exchanging.exchange if method == "all_to_all" else exchanging.gather
        met = meet(builder, layout, *operands)
    scores = PlacedScores(site=site, spec=spec, builder=builder, met=met, wholes=wholes, size=layout.size)
    out = _attention(builder, spec, met, scores, tensors.sinks)
    if method == "all_to_all":
        out = layout.to_positions(builder, out)
    if near is not None:
        out = halo.unfolded(builder, layout, out)
    return out, RewrittenSite(method=method, bytes=met.bytes, halo=None if near is None else near.words)


def halo_of(site: Site, spec: AttentionSpec, layout: GraphLayout, method: str) -> Halo | None:
    """Return the halo that is exchanged in place of all keys, where the mask lets a query see only near keys.

    In place of a ring it holds no more than a ring keeps: a rank's own keys, a step's, and the next one's.
    """
    if method == "all_to_all":
        return None
    found = halo.found(allowed(site, spec), rank_length(spec), layout)
    if found is None or method != "ring":
        return found
    return found if found.keys * (rank_length(spec) // found.chunk) <= _OF_RING * rank_length(spec) else None


def allowed(site: Site, spec: AttentionSpec) -> Expr:
    """Return the condition of pairs that take part, over positions of the whole sequence."""
    causal = ix.compare("<=", Index("k"), Index("q")) if spec.mask.is_causal else ix.TRUE
    return ix.apply("and", with_bounds(site.condition or ix.TRUE), causal)


def with_bounds(condition: Expr) -> Expr:
    """Return the condition with every bounded distance, |q - k| <= w, as one bound of keys on each side.

    Where q is a position of the whole sequence and k begins with the first key of a halo, kernels know the two bounds, and not the
    distance.
    """
    return throughout(condition, _as_bounds)


def _as_bounds(x: Expr) -> Expr:
    if not isinstance(x, Test) or x.relation != ">=" or len(x.form.terms) != 1:
        return x
    (term, factor), width = x.form.terms[0], x.form.const
    if factor != -1 or not isinstance(term, Apply) or term.op != "abs" or not ix.mentions(term, Index("k")):
        return x
    (apart,) = term.args
    return ix.apply(
        "and", ix.compare("<=", apart, Const(width)), ix.compare(">=", ix.add(apart, Const(width)), Const(0))
    )


def rank_length(spec: AttentionSpec) -> int:
    """Return the number of a rank's positions."""
    if not isinstance(spec.seqlen_q, int):
        raise ValueError("sizes are checked before")
    return spec.seqlen_q


@dataclass(frozen=True, kw_only=True)
class PlacedScores:
    """The mask of a site and the additions to its scores, at positions of the whole sequence. size: ranks."""

    site: Site
    spec: AttentionSpec
    builder: GraphBuilder
    met: Met
    wholes: Wholes
    size: int

    def mask(self) -> fx.Node | None:
        """Return truth values that broadcast to (B, H, Q, N); None where every pair takes part."""
        pairs = allowed(self.site, self.spec)
        inside = None if self.met.places is None else self.met.places.inside
        if pairs == ix.TRUE:
            return inside
        mask = self._shared(("allowed", pairs), pairs, self.site.loads, torch.float64)
        if inside is None:
            return mask
        return self.builder.once(("inside", mask, inside), lambda: self.builder.call(torch.logical_and, mask, inside))

    def bias(self) -> fx.Node | None:
        """Return numbers that broadcast to (B, H, Q, N), in float32, or wider if the model's are."""
        real = computed_in(self.builder.value(self.met.q).dtype)
        total: fx.Node | None = None
        for kind in self.spec.score.proved:
            one = self._shared(("added", kind), kind.summand, self.site.score_loads, real)
            total = one if total is None else self.builder.call(torch.add, total, one)
        return total

    def _shared(self, key: object, x: Expr, loads: Mapping[str, Version], real: torch.dtype) -> fx.Node:
        check_rounding(x)
        if not self.wholes.are_chance:
            check_numbers(x, rank_length(self.spec))
        tensors = {name: self._loaded(x, name, loads) for name in sorted(x.facts.tensors)}
        nodes = tuple(tensors.items())
        key = ("scores", key, nodes, self.met.queries, self.met.places, self.met.first_head, real)
        return self.builder.once(key, lambda: self._emitted(x, tensors, real))

    def _emitted(self, x: Expr, tensors: Mapping[str, fx.Node], real: torch.dtype) -> fx.Node:
        if x.facts.sizes:
            raise CannotShard("sizes are known when the graph is compiled", ix.text(x, 80), at=self.site.match.out)
        q = self.builder.value(self.met.q)
        indices = {name: self._index(name, q) for name in x.facts.indices}
        is_beyond = self.met.places is not None and self.met.places.inside is not None
        within = {name: most for name, most in self._within().items() if name != "k" or not is_beyond}
        names = Names(device=q.device, indices=indices, tensors=tensors, within=within)
        return on_nodes.emit(self.builder, x, names, real=real)

    def _index(self, name: str, q: torch.Tensor) -> fx.Node:
        """Return the model's index of each pair that this rank computes."""
        call, device = self.builder.call, q.device
        if self.met.places is not None and name != "h":
            return {"b": self.met.places.b, "q": self.met.places.q, "k": self.met.places.k}[name]
        if name == "q":
            return call(torch.Tensor.view, self.met.queries, (1, 1, -1, 1))
        sizes = {"b": q.shape[0], "h": q.shape[1], "k": self.builder.value(self.met.k).shape[2]}
        count = call(torch.arange, sizes[name], device=device)
        if name == "h" and self.met.first_head is not None:
            count = call(torch.add, count, self.met.first_head)
        shape = {"b": (-1, 1, 1, 1), "h": (1, -1, 1, 1), "k": (1, 1, 1, -1)}[name]
        return call(torch.Tensor.view, count, shape)

    def _loaded(self, x: Expr, name: str, loads: Mapping[str, Version]) -> fx.Node:
        whole = self.wholes.whole_of(loads[name], name, int(axes.dim_size(self.site.match.axes.query)))
        shape = self.builder.value(whole).shape
        own = loads[name].node.meta["val"].shape
        within = self._within()
        for load in ix.loads(x):
            if load.tensor != name:
                continue
            for at, size, part in zip(load.at, shape, own, strict=True):
                if size != part and at.facts.indices and not at.facts.indices & {"q", "k"}:
                    raise CannotShard(
                        "what a mask or bias reads along the sequence, it reads by positions",
                        f"{ix.text(load, 80)} of {tuple(shape)}",
                        at=self.site.match.out,
                        remedy="what every rank has as a whole is named in ContextParallel(replicated=...)",
                    )
                low, high = ix.bounds(at, within)
                if low is None or high is None or low < -int(size) or high >= int(size):
                    raise CannotShard(
                        "what a mask or bias reads is there for the whole sequence",
                        f"{ix.text(load, 80)} of {tuple(shape)}",
                        at=self.site.match.out,
                        remedy="pass what masks as (batch, positions), and position_ids, to the compiled model",
                    )
        return whole

    def _within(self) -> ix.Ranges:
        match = self.site.match
        length = int(axes.dim_size(match.axes.query))
        return elements.ranges(match, {length: length * self.size})


def joined(builder: GraphBuilder, scores: PlacedScores, dtype: torch.dtype) -> fx.Node | None:
    """Join mask and bias in one tensor: truth values, or numbers in the scores' dtype. None where there is neither."""
    mask, bias = scores.mask(), scores.bias()
    added = bias if bias is None else program.cast(builder, bias, dtype)
    return mask if added is None else added if mask is None else builder.call(torch.where, mask, added, -math.inf)


def _attention(
    builder: GraphBuilder, spec: AttentionSpec, met: Met, scores: PlacedScores, sinks: fx.Node | None
) -> fx.Node:
    dtype = builder.value(met.q).dtype
    mask = joined(builder, scores, dtype)
    cap = spec.score.softcap
    are_alike = {builder.value(x).dtype for x in (met.k, met.v)} == {dtype}
    if cap is None and sinks is None and are_alike:
        return builder.call(
            torch.nn.functional.scaled_dot_product_attention,
            *(met.q, met.k, met.v),
            attn_mask=mask,
            scale=spec.score.scale,
            enable_gqa=spec.is_gqa,
        )
    return _written_out(builder, spec, met, mask, cap, sinks)


def _written_out(
    builder: GraphBuilder,
    spec: AttentionSpec,
    met: Met,
    mask: fx.Node | None,
    cap: float | None,
    sinks: fx.Node | None,
) -> fx.Node:
    """Emit products and a softmax, for changes that no call of PyTorch supports."""
    call, value = builder.call, builder.value
    q = value(met.q)
    repeats = q.shape[1] // value(met.k).shape[1]
    k, v = (x if repeats == 1 else call(torch.repeat_interleave, x, repeats, 1) for x in (met.k, met.v))
    scores = call(torch.mul, call(torch.matmul, met.q, call(torch.transpose, k, 2, 3)), spec.score.scale)
    if cap is not None:
        scores = call(torch.mul, call(torch.tanh, call(torch.div, scores, cap)), cap)
    if mask is not None and value(mask).dtype == torch.bool:
        scores = call(torch.masked_fill, scores, call(torch.logical_not, mask), -math.inf)
    elif mask is not None:
        scores = call(torch.add, scores, mask)
    wide = torch.promote_types(q.dtype, torch.float32)
    if sinks is None:
        weights = call(torch.softmax, scores, -1, dtype=wide)
    else:
        column = call(torch.Tensor.view, _of_heads(builder, met, sinks), (1, -1, 1, 1))
        column = call(torch.Tensor.expand, program.cast(builder, column, q.dtype), (q.shape[0], -1, q.shape[2], 1))
        weights = call(torch.softmax, call(torch.cat, (scores, column), -1), -1, dtype=wide)
        weights = call(torch.narrow, weights, -1, 0, value(met.k).shape[2])
    return call(torch.matmul, program.cast(builder, weights, value(v).dtype), v)


def _of_heads(builder: GraphBuilder, met: Met, x: fx.Node) -> fx.Node:
    """Take this rank's heads out of the model's (H,)."""
    if met.first_head is None:
        return x
    device = builder.value(x).device
    own = builder.call(torch.arange, builder.value(met.q).shape[1], device=device)
    return builder.call(torch.index_select, x, 0, builder.call(torch.add, own, met.first_head))
