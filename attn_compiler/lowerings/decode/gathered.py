"""The chosen keys alone, where a model names a query's keys by their indices: the kernel then reads a short gathered sequence, not the
cache. Each of several queries becomes a batch row of its own.

Time grows with the chosen keys and not with the cache. The mask's other parts are evaluated at each chosen key's position. A gather reads
and writes each chosen key, and the kernel reads it again. So keys are gathered where the cache has `_TIMES` as many, or where its length
has no bound: a short cache is quick to read either way.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Const, Expr, Index, Load, on_nodes
from attn_compiler.index_expr.on_nodes import Names
from attn_compiler.lowerings.base import Emitter, Operands
from attn_compiler.lowerings.decode import plan as decode_plan
from attn_compiler.lowerings.shared.parts import latents, part_tensors
from attn_compiler.lowerings.shared.parts.site_parts import Parts
from attn_compiler.spec import chosen_keys, dims, reads
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.chosen_keys import Chosen
from attn_compiler.spec.masks import SEQLEN_KV, SEQLEN_Q, Dense, Formula, KeyPadding, MaskSpec
from attn_compiler.torch_private import symbols as torch_symbols

aten = torch.ops.aten

B, H, Q, K, J = map(Index, ("b", "h", "q", "k", "j"))

#: keys of the cache for each chosen one, from which on keys are gathered. benchmarks/results/chosen_keys_h200.csv: at 8 times as many,
#: a step takes 29 us gathered and 34 with cuDNN over the whole cache, at 4 times 32 and 23
_TIMES = 8
#: parts of a mask that can be evaluated at a single key
_OF_A_KEY = frozenset({"rows", "lengths", "keys"})


def chosen_of(spec: AttentionSpec) -> Chosen | None:
    """Return the choice by which each query's keys are gathered; None where they are not."""
    chosen, score = spec.mask.chosen, spec.score
    if chosen is None or spec.stored is not None or not _are_few(spec, chosen) or not _says_all(spec.mask):
        return None
    if spec.latent is not None and any(ix.mentions(x, H) for x in chosen.at):
        return None
    is_lost = reads.names_in(Load(chosen.tensor, chosen.at, "int")) & set(spec.mask.out_of_reach)
    if is_lost or score.proved or score.bias is not None or not _is_by_group(spec, chosen):
        return None
    found = _others(spec, chosen)
    return chosen if found.kinds <= _OF_A_KEY and not found.keys_given else None


@dataclass(frozen=True, kw_only=True)
class OverChosen:
    """The kernel's spec and operands. queries: of the site, where each is a batch row; None: nothing was gathered."""

    spec: AttentionSpec
    operands: Operands
    queries: int | None = None

    def restored(self, emitter: Emitter, x: fx.Node) -> fx.Node:
        """Return the kernel's (B · Sq, H, 1, …) as (B, H, Sq, …)."""
        if self.queries is None:
            return x
        by_query = emitter.call(torch.squeeze, emitter.call(torch.unflatten, x, 0, (-1, self.queries)), 3)
        return emitter.call(torch.transpose, by_query, 1, 2)


def read(emitter: Emitter, spec: AttentionSpec, operands: Operands, *, of_latent: bool = False) -> OverChosen:
    """Return the attention over the chosen keys, where they are gathered; else unchanged. of_latent: gather the latent, not k and v."""
    chosen = chosen_of(spec)
    if chosen is None:
        return OverChosen(spec=spec, operands=operands)
    emitter.note(f"the {chosen.keys} keys of {chosen.words} are read, and no others of {spec.seqlen_kv}")
    gathering = _Gathering(emitter, spec, operands, chosen)
    mask, queries = gathering.mask(), gathering.queries
    operands = gathering.of_latent() if of_latent else gathering.of_keys()
    operands = dataclasses.replace(operands, q=gathering.by_query(operands.q), mask=mask)
    spec = _chosen_spec(emitter, spec, operands, of_latent=of_latent)
    return OverChosen(spec=spec, operands=operands, queries=None if queries == 1 else queries)


def _are_few(spec: AttentionSpec, chosen: Chosen) -> bool:
    """Return whether the chosen keys are few beside those of the cache, in some call at least."""
    if chosen.keys is None or not isinstance(spec.seqlen_q, int):
        return False
    _, most = dims.range_of(spec, spec.seqlen_kv)
    return most is None or most >= _TIMES * chosen.keys * spec.seqlen_q


def _says_all(mask: MaskSpec) -> bool:
    """Return whether the mask's kinds describe all of it except the choice."""
    return mask.reason is None or (mask.rest is not None and chosen_keys.say_all_of(mask.rest.condition, mask.chosen))


def _is_by_group(spec: AttentionSpec, chosen: Chosen) -> bool:
    """Return whether all heads that share a key have the same indices."""
    if any(ix.mentions(x, K) for x in chosen.at):
        return False
    return all(x.facts.indices.isdisjoint({"h"}) or _is_of_groups(x, spec) for x in chosen.at)


def _is_of_groups(x: Expr, spec: AttentionSpec) -> bool:
    """Return whether an expression is h, or h over a number of heads, with one value for all heads of a group."""
    group = _group(spec)
    match x:
        case Index(name="h"):
            return group == 1
        case Apply(op="floordiv", args=(Index(name="h"), Const(value=int(size)))):
            return group is not None and size % group == 0
    return False


def _group(spec: AttentionSpec) -> int | None:
    heads, heads_kv = spec.num_heads_q, spec.num_heads_kv
    return heads // heads_kv if isinstance(heads, int) and isinstance(heads_kv, int) else None


def _others(spec: AttentionSpec, chosen: Chosen) -> Parts:
    """Return the mask's parts without the choice itself."""
    kinds = tuple(
        kind
        for kind in spec.mask.kinds
        if not (isinstance(kind, (KeyPadding, Formula)) and kind.condition == chosen.condition)
    )
    if not kinds:
        return Parts()
    mask = dataclasses.replace(spec.mask, kinds=kinds, reason=None, rest=None)
    return decode_plan.parts(dataclasses.replace(spec, mask=mask))


class _Gathering:
    """Nodes of the gathering. Indices are (R, L), or (R, Hkv, L) where heads differ in their keys; a row R is a pair of a batch row and a
    query."""

    def __init__(self, emitter: Emitter, spec: AttentionSpec, operands: Operands, chosen: Chosen) -> None:
        self._emitter = emitter
        self._spec = spec
        self._given = operands
        self._chosen = chosen
        self._device = emitter.value(operands.q).device
        self.by_head = any(ix.mentions(x, H) for x in chosen.at)
        self.queries = decode_plan.known(spec.seqlen_q)
        further = 2 if self.by_head else 1
        row = self._once("chosen rows", lambda: self._count(self._rows, further))
        self._row, self._query = row, None
        if self.queries > 1:
            self._row = self._once(
                "batch rows", lambda: self._call(torch.div, row, self.queries, rounding_mode="floor")
            )
            self._query = self._once("queries of rows", lambda: self._call(torch.remainder, row, self.queries))
        self._head = self._once("heads", lambda: self._count(self._heads, 1)) if self.by_head else None
        self._numbers = self._once("chosen numbers", self._chosen_numbers)
        self._named = self._once("named keys", self._named_keys)
        self._keys = self._named if chosen.is_within else self._once("chosen keys", self._within)

    def by_query(self, q: fx.Node) -> fx.Node:
        """Return (B, Hq, Sq, D) as (R, Hq, 1, D)."""
        if self.queries == 1:
            return q
        rows = self._call(torch.flatten, self._call(torch.transpose, q, 1, 2), 0, 1)
        return self._call(torch.unsqueeze, rows, 2)

    def mask(self) -> fx.Node | None:
        """Return bool (R, 1 or Hq, 1, L), the chosen keys that count; None if all do."""
        conditions = [*_conditions(_others(self._spec, self._chosen))]
        if not self._chosen.is_within:
            conditions.append(ix.compare("<", K, SEQLEN_KV))
        if not conditions and self._chosen.distinct:
            return None
        return self._once("chosen keys that count", lambda: self._counting(conditions), *conditions)

    def of_keys(self) -> Operands:
        """Gather k and v at the chosen keys."""
        k = self._at_keys(self._given.k)
        v = k if self._given.v is self._given.k else self._at_keys(self._given.v)
        return dataclasses.replace(self._given, k=k, v=v)

    def of_latent(self) -> Operands:
        """Gather the latent and the rope part at the chosen keys."""
        nodes = latents.given(self._given)
        rope = None if nodes.rope is None else self._at_keys(nodes.rope)
        moved = dataclasses.replace(nodes, latent=self._at_keys(nodes.latent), rope=rope)
        return dataclasses.replace(self._given, latent=moved)

    def _at_keys(self, x: fx.Node) -> fx.Node:
        """Gather (B, heads, Skv, dims) at the chosen keys: (R, heads, L, dims)."""
        found = self._call(aten.index.Tensor, x, [self._row, self._head, self._keys])
        return found if self.by_head else self._call(torch.transpose, found, 1, 2)

    def _chosen_numbers(self) -> fx.Node:
        """Return the indices as int64 (R, count) or (R, Hkv, count)."""
        count = on_nodes.size_of(self._emitter, self._given.loads[self._chosen.tensor], -1)
        places = self._call(torch.arange, count, device=self._device)
        for _ in range(2 if self.by_head else 1):
            places = self._call(torch.unsqueeze, places, 0)
        heads = ix.mul(H, Const(_group(self._spec) or 1))
        at = [ix.substitute(self._without_query(x), H, heads) for x in self._chosen.at]
        load = Load(self._chosen.tensor, (*at, J), "int")
        found = on_nodes.emit(self._emitter, load, self._names((load,), {**self._indices, "j": places}))
        shape = [self._rows, *([self._heads] if self.by_head else []), -1]
        return self._call(torch.Tensor.expand, found, *shape)

    def _named_keys(self) -> fx.Node:
        """Return the keys of the chosen blocks, int64 (…, L)."""
        if self._chosen.block == 1:
            return self._numbers
        first = self._call(torch.unsqueeze, self._call(torch.mul, self._numbers, self._chosen.block), -1)
        inner = self._call(torch.arange, self._chosen.block, device=self._device)
        return self._call(torch.flatten, self._call(torch.add, first, inner), -2)

    def _within(self) -> fx.Node:
        """Clamp keys beyond the end to the last key."""
        _, keys = part_tensors.lengths(self._emitter, self._spec, self._given)
        last = keys - 1 if isinstance(keys, int) else self._call(operator.sub, keys, 1)
        return self._call(torch.clamp, self._named, max=last)

    def _counting(self, conditions: list[Expr]) -> fx.Node:
        names = self._names(conditions, {**self._indices, "k": self._named})
        found = [on_nodes.emit(self._emitter, self._without_query(x), names) for x in conditions]
        found += [] if self._chosen.distinct else [self._first_of_each()]
        allowed = reduce(lambda a, b: self._call(torch.logical_and, a, b), found)
        whole = self._call(torch.Tensor.expand_as, allowed, self._named)
        whole = self._call(torch.unsqueeze, whole, -2)
        if not self.by_head:
            return self._call(torch.unsqueeze, whole, 1)
        return self._call(torch.repeat_interleave, whole, _group(self._spec) or 1, 1)

    def _first_of_each(self) -> fx.Node:
        """Return bool (…, L): True at the first of equal indices of a row, so that a key counts once."""
        ours, others = (self._call(torch.unsqueeze, self._numbers, axis) for axis in (-1, -2))
        same = self._call(torch.tril, self._call(torch.eq, ours, others), -1)
        first = self._call(torch.logical_not, self._call(torch.any, same, -1))
        block = self._chosen.block
        return first if block == 1 else self._call(torch.repeat_interleave, first, block, -1)

    # ---- nodes ----------------------------------------------------------------------------------------------------

    def _without_query(self, x: Expr) -> Expr:
        """Set the query index to 0 where there is a single query."""
        return ix.substitute(x, Q, ix.ZERO) if self._query is None else x

    @property
    def _rows(self) -> int | fx.Node:
        batch = on_nodes.size_of(self._emitter, self._given.q, 0)
        if isinstance(batch, int):
            return batch * self.queries
        return batch if self.queries == 1 else self._call(operator.mul, batch, self.queries)

    @property
    def _heads(self) -> int:
        """Number of key heads."""
        return decode_plan.known(self._spec.num_heads_kv)

    @property
    def _indices(self) -> dict[str, fx.Node]:
        given = {"b": self._row, "q": self._query, "h": self._head}
        return {name: node for name, node in given.items() if node is not None}

    def _names(self, used: Iterable[Expr], indices: dict[str, fx.Node]) -> Names:
        queries, keys = part_tensors.lengths(self._emitter, self._spec, self._given)
        sizes = {SEQLEN_Q.name: queries, SEQLEN_KV.name: keys}
        sizes |= part_tensors.sizes_in(self._emitter, self._given, used)
        return Names(device=self._device, indices=indices, sizes=sizes, tensors=self._given.loads)

    def _count(self, size: int | fx.Node, following: int) -> fx.Node:
        """Return int64 0, 1, … below a size, with `following` axes of size one after it."""
        indices = self._call(torch.arange, size, device=self._device)
        return reduce(lambda x, _: self._call(torch.unsqueeze, x, -1), range(following), indices)

    def _once(self, name: str, make: Callable[[], fx.Node], *made_from: Expr) -> fx.Node:
        """Make one node for all layers that have the choice."""
        loads = tuple(sorted((name, node.name) for name, node in self._given.loads.items()))
        spec = self._spec
        sizes = (spec.batch, spec.num_heads_q, spec.num_heads_kv, spec.seqlen_q, spec.seqlen_kv, self._device)
        return self._emitter.once((name, self._chosen, made_from, loads, sizes), make)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self._emitter.call(function, *args, **kwargs)


def _conditions(found: Parts) -> Iterator[Expr]:
    """Yield the conditions of a key besides being chosen."""
    if found.rows is not None and found.rows.lower is not None:
        yield ix.compare(">=", K, found.rows.lower)
    if found.rows is not None and found.rows.upper is not None:
        yield ix.compare("<", K, found.rows.upper)
    if found.keys is not None:
        yield found.keys


def _chosen_spec(emitter: Emitter, spec: AttentionSpec, operands: Operands, *, of_latent: bool) -> AttentionSpec:
    """Return the spec of the chosen keys, with the layout of the gathered tensors."""

    def moved(node: fx.Node) -> TensorSpec:
        value = emitter.value(node)
        shape, strides = (tuple(map(torch_symbols.dim_of, sizes)) for sizes in (value.shape, value.stride()))
        return TensorSpec(shape=shape, strides=strides, dtype=str(value.dtype).removeprefix("torch."))

    dense = None if operands.mask is None else Dense(shape=moved(operands.mask).shape, dtype="bool")
    spec = dataclasses.replace(spec, mask=MaskSpec(dense=dense))
    if not of_latent or spec.latent is None:
        return dataclasses.replace(spec, q=moved(operands.q), k=moved(operands.k), v=moved(operands.v))
    nodes = latents.given(operands)
    latent = dataclasses.replace(
        spec.latent, latent=moved(nodes.latent), rope=None if nodes.rope is None else moved(nodes.rope)
    )
    rows, _, keys, _ = latent.latent.shape
    k, v = (dataclasses.replace(x, shape=(rows, x.shape[1], keys, x.shape[3])) for x in (spec.k, spec.v))
    return dataclasses.replace(spec, q=moved(operands.q), k=k, v=v, latent=latent)
