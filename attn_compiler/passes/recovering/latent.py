"""Find the latent that k and v are linear maps of (multi-head latent attention).

Models that cache a compressed form of k and v compute both from the whole cache in each step, as `linear(latent, W)` cut into heads. One
part of a head is v. The other part is k, together with a part that all heads share and that carries the positions. If q and the output are
multiplied by that weight, attention runs over the latent itself: one head of keys and values for all query heads. No names are compared:
k and v are traced element by element (columns.py).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Expr
from attn_compiler.passes.graph import axes, calls, mutation
from attn_compiler.passes.graph.axes import Atom, AxisError, Dim
from attn_compiler.passes.graph.calls import reached
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Latent, Match, Operand, Projection
from attn_compiler.passes.graph.unit import tensor_kind
from attn_compiler.passes.graph.views import argument
from attn_compiler.passes.matching.operands import pairs
from attn_compiler.passes.recovering import columns
from attn_compiler.passes.recovering.columns import BATCH, HEAD, HEAD_DIM, KEY, ColumnRun, Columns
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason

aten = torch.ops.aten

_MADE_OF_ONE = "k and v are linear maps of one latent"


class _No(Exception):
    """k and v are nearly maps of one latent, but not quite; `reason` says why. Internal."""

    def __init__(self, observed: str, *, rule: str = _MADE_OF_ONE, remedy: str | None = None) -> None:
        super().__init__(observed)
        self.reason = Reason(code=Code.LATENT, rule=rule, observed=observed, remedy=remedy)


class _Linear(NamedTuple):
    """A linear call: its result, input and weight, which are mirror nodes. bias: it adds one."""

    made: fx.Node
    source: fx.Node
    weight: fx.Node
    bias: bool


class Finder:
    """Finds the latents of the sites of one mirror."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror

    @functools.cached_property
    def _columns(self) -> Columns:
        return Columns(self._mirror)

    def find(self, match: Match) -> Latent | Reason | None:
        """Return the latent of a site; the reason if v is computed from a whole cache but has no latent; else None.

        A site with as many queries as keys is a prompt or a training step: k and v are new, so the result is None.
        """
        if axes.same_size(axes.dim_size(match.axes.query), axes.dim_size(match.axes.key)):
            return None
        if match.scores.factors and any(factor.operand is None for factor in match.scores.factors):
            return None
        runs = self._columns.runs(match, match.v, match.axes.head_dim_v)
        made = columns.made_by(self._mirror, runs[0].of) if runs is not None and len(runs) == 1 else None
        if runs is None or made is None:
            return None
        try:
            linear = self._linear(runs[0], made)
            return None if linear is None else self._of(match, runs[0], linear)
        except AxisError:
            return None
        except _No as no:
            return no.reason

    # ---- the projection of v --------------------------------------------------------------------------------------

    def _linear(self, run: ColumnRun, made: fx.Node) -> _Linear | None:
        """Return the linear call that made the tensor, or None. Raises _No if something is added to its result."""
        if run.of.node.target is aten.linear.default:
            return self._parsed(run.of.node)
        if calls.target_name(made) in _ADDS and any(map(_comes_of_linear, made.all_input_nodes)):
            raise _No(
                "something is added to what the projection gives: a LoRA adapter, or a bias",
                remedy="merge adapters into the weights (model.merge_and_unload())",
            )
        return None

    def _parsed(self, node: fx.Node) -> _Linear | None:
        source, weight, bias = (argument(node, name) for name in ("input", "weight", "bias"))
        if not isinstance(source, fx.Node) or not isinstance(weight, fx.Node):
            return None
        first = self._mirror.first_name
        return _Linear(node, first(source), first(weight), bias is not None)

    # ---- all of it ------------------------------------------------------------------------------------------------

    def _of(self, match: Match, of_v: ColumnRun, linear: _Linear) -> Latent:
        if not axes.same_size(axes.dim_size(match.axes.heads), axes.dim_size(match.axes.heads_kv)):
            raise _No("heads of k and v are shared by heads of q")
        runs = self._columns.runs(match, match.k, match.axes.head_dim_qk)
        if runs is None or len(runs) > 2:
            raise _No("what k's dims are made of can't be said")
        own, shared = self._parted(runs, linear)
        of_k = self._linear_of(own)
        self._check(match, linear, of_k)
        rank = axes.shape_exprs(linear.weight.meta["val"])[1]
        if not rank.is_Integer:
            raise _No("the size of the latent is not known", remedy="compile with dynamic=None")
        place = of_v.at[:-1]
        if own.at[:-1] != place:
            raise _No("k and v are made of the latent in different places")
        latent_dim: Dim = (Atom(rank),)
        rope_dim: Dim = () if shared is None or shared.size == 1 else (Atom(axes.size_expr(shared.size)),)
        made_for = nodes_made_for(self._mirror, match, {linear.made, of_k.made})
        added = [self._mirror.owner(term.operand.root) for term in match.scores.terms]
        if made_for is None or any(node in made_for for node in added):
            raise _No("something besides the attention reads k or v, so they are made anyhow")
        found = Latent(
            made_for=made_for,
            latent=self._operand(match, linear.source, linear.made, place, latent_dim),
            rank=latent_dim,
            rope=None if shared is None else self._rope(match, shared, rope_dim),
            rope_dim=rope_dim,
            k=self._projection(match, of_k, own),
            v=self._projection(match, linear, of_v),
            nope_first=shared is None or own.first == 0,
        )
        self._check_memory(match, found)
        return found

    def _parted(self, runs: Sequence[ColumnRun], linear: _Linear) -> tuple[ColumnRun, ColumnRun | None]:
        """Return the part of k that differs between heads, and the part that all heads share."""
        own = [run for run in runs if any(ix.mentions(x, HEAD) for x in run.at) or len(runs) == 1]
        shared = [run for run in runs if run not in own]
        if len(own) > 1:
            # Only one part may differ between heads: the one without positions (nope).
            maps = [run for run in own if run.of.node is linear.made]
            raise _No(
                "each head of k has a rotary part of its own"
                if maps
                else "the part of k of each head is not what a projection gives"
            )
        if len(own) == 0:
            raise _No("no part of k differs from head to head")
        return own[0], shared[0] if shared else None

    def _linear_of(self, run: ColumnRun) -> _Linear:
        made = columns.made_by(self._mirror, run.of)
        linear = None if made is None else self._linear(run, made)
        if linear is None:
            what = "is written in place" if made is None else f"is made by {calls.target_name(made)}"
            raise _No(
                f"the part of k of each head {what}: it is not what the projection gives (a rotary embedding on it, a norm, a scale)"
            )
        return linear

    def _check(self, match: Match, of_v: _Linear, of_k: _Linear) -> None:
        if of_v.bias or of_k.bias:
            raise _No(
                "the projection has a bias", remedy="fold the bias into the model's other projections, or leave it out"
            )
        if of_k.source is not of_v.source:
            raise _No("k and v are made of two latents")
        first = min(of_k.made, of_v.made, key=self._mirror.order)
        for linear in (of_k, of_v):
            self._check_unwritten(match, linear.source, first, "latent")
            self._check_unwritten(match, linear.weight, linear.made, "weight of the projection")
        dtypes = {node.meta["val"].dtype for of in (of_k, of_v) for node in of[:3]}
        if len(dtypes) > 1:
            raise _No(f"they are made in {' and '.join(sorted(str(dtype).removeprefix('torch.') for dtype in dtypes))}")

    def _check_unwritten(self, match: Match, node: fx.Node, since: fx.Node, what: str) -> None:
        writer = mutation.written_between(self._mirror, node, since, match.out)
        if writer is not None:
            name = getattr(writer.target, "__name__", "a call").split(".")[0]
            raise _No(f"the {what} is written in between, by {name}", remedy="write to it after the attention")

    def _check_memory(self, match: Match, found: Latent) -> None:
        memory = set().union(*map(mutation.storages, found.sources))
        if mutation.reshaped(self._mirror, memory) is not None:
            raise _No("one of the tensors changes its shape in place")
        for node in found.sources:
            dynamo = self._mirror.dynamo_node(node)
            value = None if dynamo is None else dynamo.meta.get("example_value")
            if not isinstance(value, torch.Tensor):
                raise _No("one of the tensors exists only inside one call of the graph")
            kind = tensor_kind(value)
            if kind is not None:
                raise _No(f"one of the tensors is {kind}")

    # ---- its parts ------------------------------------------------------------------------------------------------

    def _projection(self, match: Match, linear: _Linear, run: ColumnRun) -> Projection:
        """Return the projection. Raises _No unless its columns are split into consecutive heads of equal size."""
        heads, column = axes.dim_size(match.axes.heads), ix.linear(run.at[-1])
        rows = axes.shape_exprs(linear.weight.meta["val"])[0]
        factors = dict(column.terms)
        is_cut = factors.keys() <= {HEAD, HEAD_DIM} and factors.get(HEAD_DIM, 0 if run.size > 1 else 1) == 1
        if not is_cut or not heads.is_Integer or not rows.is_Integer:
            raise _No("heads are not equal parts of what the projection gives, one after the other")
        count = int(heads)
        each = factors.get(HEAD, int(rows))
        if each * count != int(rows) or not 0 <= column.const <= each - run.size:
            raise _No("heads are not equal parts of what the projection gives, one after the other")
        return Projection(
            weight=linear.weight, made=linear.made, heads=count, each=each, first=column.const, size=run.size
        )

    def _rope(self, match: Match, run: ColumnRun, last: Dim) -> Operand:
        until = run.of.until
        if until is not None and self._mirror.order(until) < self._mirror.order(match.out):
            raise _No("the part of k that heads share is written in between", remedy="write to it after the attention")
        wanted = (HEAD_DIM,) if run.size > 1 else (HEAD_DIM, ix.ZERO)
        extent = axes.shape_exprs(run.of.node.meta["val"])[-1]
        if run.at[-1] not in wanted or not axes.same_size(extent, axes.size_expr(run.size)):
            raise _No("the part of k that heads share is only a part of its tensor")
        if self._mirror.dynamo_node(run.of.node) is None:
            raise _No("the part of k that heads share exists only inside one call of the graph")
        return self._operand(match, run.of.node, match.out, run.at[:-1], last)

    def _operand(self, match: Match, node: fx.Node, used: fx.Node, place: tuple[Expr, ...], last: Dim) -> Operand:
        """Return a tensor as an operand. Its axes are batch and key, each at most once, axes of size one, and `last`."""
        by_index: dict[Expr, Dim] = {BATCH: match.axes.batch, KEY: match.axes.key, ix.ZERO: ()}
        sizes = axes.shape_exprs(node.meta["val"])
        own = [by_index.get(index) for index in place]
        if any(dim is None for dim in own) or any(place.count(index) > 1 for index in (BATCH, KEY)):
            raise _No("the latent's axes are not the batch and the keys")
        dims = (*(dim for dim in own if dim is not None), last)
        root_dims = axes.fresh(sizes)
        for index, group in ((BATCH, match.axes.batch), (KEY, match.axes.key)):
            if index not in place and axes.dim_size(group) != axes.ONE:
                raise _No("the latent's axes are not the batch and the keys")
        return Operand(node=node, used=used, dims=dims, root=node, root_dims=root_dims, reads=pairs(root_dims, dims))


_ADDS = ("add", "add_", "iadd", "__add__", "baddbmm", "addmm")


def _comes_of_linear(node: fx.Node) -> bool:
    """True for a linear call, and for a product with its result."""
    found = [node, *(node.all_input_nodes if calls.target_name(node) == "mul" else ())]
    return any(calls.target_name(n) == "linear" for n in found)


def nodes_made_for(mirror: Mirror, match: Match, first: Iterable[fx.Node]) -> frozenset[fx.Node] | None:
    """Return the Dynamo nodes that depend on these mirror nodes and that only the site needs. None: something else needs one of them.

    Writers into memory that was made in between, and all nodes that share it, are among them. first: nodes that only make new tensors.
    """
    site = {mirror.owner(node) for node in (*match.covered, match.out)}
    own = {owner for node in first if (owner := mirror.owner(node)) is not None}
    found: set[fx.Node] = set()

    def further(node: fx.Node) -> list[fx.Node]:
        written = (mutation.storages(memory) for writer in mirror.owned(node) for memory in mutation.writes(writer))
        return [x for x in (*node.users, *_holders(mirror, set().union(*written))) if x not in site]

    for node in reached(own - site, further):
        if node.op not in ("call_function", "call_method") or not (node in own or _is_plain(mirror, node)):
            return None
        found.add(node)
    return frozenset(found)


def _is_plain(mirror: Mirror, node: fx.Node) -> bool:
    """Return whether a node consists of ops that are fully understood."""
    return all(isinstance(n.target, torch._ops.OpOverload) or n.target is operator.getitem for n in mirror.owned(node))


def _holders(mirror: Mirror, memory: set[StorageWeakRef]) -> list[fx.Node]:
    if not memory:
        return []
    owners = (mirror.owner(node) for node in mirror.graph.nodes if mutation.storages(node) & memory)
    return [owner for owner in dict.fromkeys(owners) if owner is not None]
