"""The chosen keys alone, where a model names a query's keys by their indices: the kernel then reads a short sequence in the cache's place.

Time follows the chosen keys and not the cache. Which of them count, the other parts of the mask say, each asked at the key's own place.
By reasoning, and not measured: a gather reads and writes each chosen key, and the kernel reads it again, so it is taken where the cache
has `_TIMES` as many keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import reduce

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Expr, Index, Load, on_nodes
from attn_compiler.index_expr.on_nodes import Names
from attn_compiler.lowerings.base import Emitter, LatentNodes, Operands
from attn_compiler.lowerings.choice import shape_class
from attn_compiler.lowerings.decode import plan as decode_plan
from attn_compiler.lowerings.shared import part_tensors
from attn_compiler.lowerings.shared.intervals import SEQLEN_KV, SEQLEN_Q, mentions_any
from attn_compiler.lowerings.shared.parts import Parts
from attn_compiler.spec import reads
from attn_compiler.spec.attention import AttentionSpec, Dim, LatentSpec, TensorSpec
from attn_compiler.spec.chosen_keys import Chosen
from attn_compiler.spec.masks import Dense, MaskSpec

aten = torch.ops.aten

B, H, Q, K, J = map(Index, ("b", "h", "q", "k", "j"))

#: keys of the cache for each chosen one, from which on the chosen ones are gathered
_TIMES = 4
#: parts of a mask that can be asked of a key by itself
_OF_A_KEY = frozenset({"rows", "lengths", "keys"})


def chosen_of(spec: AttentionSpec) -> Chosen | None:
    """What one query's keys are gathered by; None where they are not."""
    chosen, found = spec.mask.chosen, decode_plan.parts(spec)
    if chosen is None or not isinstance(chosen.count, int) or spec.seqlen_q != 1 or spec.stored is not None:
        return None
    is_lost = reads.names_in(Load(chosen.tensor, chosen.at, "int")) & set(spec.mask.out_of_reach)
    if is_lost or any(mentions_any(x, H, K) for x in chosen.at):
        return None
    if not found.kinds <= _OF_A_KEY or found.keys_given:
        return None
    return chosen if shape_class.chosen_for(spec, spec.seqlen_kv) >= _TIMES * chosen.count else None


def read(emitter: Emitter, spec: AttentionSpec, operands: Operands) -> tuple[AttentionSpec, Operands]:
    """The attention over the chosen keys, where they are gathered; else the very same."""
    chosen = chosen_of(spec)
    if chosen is None or not isinstance(chosen.count, int):
        return spec, operands
    emitter.note(f"the {chosen.count} keys of {chosen.words} are read, and no others of {spec.seqlen_kv}")
    gathering = _Gathering(emitter, spec, operands, chosen)
    mask = gathering.mask()
    operands = gathering.gathered()
    dense = None if mask is None else Dense(shape=(spec.batch, 1, 1, chosen.count), dtype="bool")
    return _of_chosen(spec, chosen.count, MaskSpec(dense=dense)), dataclasses.replace(operands, mask=mask)


class _Gathering:
    def __init__(self, emitter: Emitter, spec: AttentionSpec, operands: Operands, chosen: Chosen) -> None:
        self._emitter = emitter
        self._spec = spec
        self._given = operands
        self._chosen = chosen
        self._device = emitter.value(operands.q).device
        self._row = emitter.once(("batch rows", spec.batch, self._device), self._rows_of_batch)
        self._keys = emitter.once(self._key("chosen keys"), self._chosen_keys)

    def mask(self) -> fx.Node | None:
        """bool (B, 1, 1, count): which of the chosen keys count; None if all do."""
        conditions = [*_conditions(decode_plan.parts(self._spec), self._chosen)]
        if not conditions and self._chosen.distinct:
            return None
        return self._emitter.once(self._key("chosen keys that count", *conditions), lambda: self._counting(conditions))

    def gathered(self) -> Operands:
        """k and v, or what they are made of, at the chosen keys."""
        given = self._given
        if self._spec.latent is not None and given.latent is not None:
            nodes = given.latent
            rope = None if nodes.rope is None else self._at_keys(nodes.rope)
            latent = LatentNodes(
                latent=self._at_keys(nodes.latent), rope=rope, weight_k=nodes.weight_k, weight_v=nodes.weight_v
            )
            return dataclasses.replace(given, latent=latent)
        k = self._at_keys(given.k)
        return dataclasses.replace(given, k=k, v=k if given.v is given.k else self._at_keys(given.v))

    def _at_keys(self, x: fx.Node) -> fx.Node:
        """(B, heads, Skv, dims) at the chosen keys: (B, heads, count, dims), a key's heads side by side."""
        found = self._emitter.call(aten.index.Tensor, x, [self._row, None, self._keys])
        return self._emitter.call(torch.transpose, found, 1, 2)

    def _rows_of_batch(self) -> fx.Node:
        """int64 (B, 1)"""
        size = on_nodes.size_of(self._emitter, self._given.q, 0)
        return self._emitter.call(torch.unsqueeze, self._emitter.call(torch.arange, size, device=self._device), 1)

    def _chosen_keys(self) -> fx.Node:
        """int64 (B, count)"""
        places = self._emitter.call(torch.unsqueeze, self._emitter.call(
            torch.arange, self._chosen.count, device=self._device), 0
        )  # fmt: skip
        at = (*(ix.substitute(x, Q, ix.ZERO) for x in self._chosen.at), J)
        load = Load(self._chosen.tensor, at, "int")
        counted = {"b": self._emitter.value(self._given.q).shape[0], "j": self._emitter.value(places).shape[1]}
        names = dataclasses.replace(self._names((load,)), indices={"b": self._row, "j": places}, counted=counted)
        found = on_nodes.emit(self._emitter, load, names)
        return self._emitter.call(torch.Tensor.expand, found, on_nodes.size_of(self._emitter, self._given.q, 0), -1)

    def _counting(self, conditions: list[Expr]) -> fx.Node:
        names = dataclasses.replace(self._names(conditions), indices={"b": self._row, "k": self._keys})
        found = [on_nodes.emit(self._emitter, ix.substitute(x, Q, ix.ZERO), names) for x in conditions]
        found += [] if self._chosen.distinct else [self._first_of_each()]
        allowed = reduce(lambda a, b: self._emitter.call(torch.logical_and, a, b), found)
        whole = self._emitter.call(torch.Tensor.expand_as, allowed, self._keys)
        return self._emitter.call(torch.unsqueeze, self._emitter.call(torch.unsqueeze, whole, 1), 1)

    def _first_of_each(self) -> fx.Node:
        """bool (B, count): a key that a row names twice counts once."""
        ours, others = (self._emitter.call(torch.unsqueeze, self._keys, axis) for axis in (2, 1))
        same = self._emitter.call(torch.tril, self._emitter.call(torch.eq, ours, others), -1)
        return self._emitter.call(torch.logical_not, self._emitter.call(torch.any, same, -1))

    def _names(self, used: Iterable[Expr]) -> Names:
        """What expressions name, but for their indices."""
        queries, keys = part_tensors.lengths(self._emitter, self._spec, self._given)
        sizes = {SEQLEN_Q.name: queries, SEQLEN_KV.name: keys}
        for name in sorted({name for x in used for name in reads.names_in(x)} & self._given.sizes.keys()):
            place = self._given.sizes[name]
            own = place.node if place.axis is None else on_nodes.size_of(self._emitter, place.node, place.axis)
            sizes[name] = own
        return Names(device=self._device, sizes=sizes, tensors=self._given.loads)

    def _key(self, name: str, *made_from: Expr) -> tuple[object, ...]:
        loads = tuple(sorted((name, node.name) for name, node in self._given.loads.items()))
        return name, self._chosen, made_from, loads, self._spec.batch, self._spec.seqlen_kv, self._device


def _conditions(found: Parts, chosen: Chosen) -> Iterable[Expr]:
    """What a key has to hold, but for being chosen."""
    if found.rows is not None and found.rows.lower is not None:
        yield ix.compare(">=", K, found.rows.lower)
    if found.rows is not None and found.rows.upper is not None:
        yield ix.compare("<", K, found.rows.upper)
    if found.keys is not None:
        parts = found.keys.args if isinstance(found.keys, ix.Apply) and found.keys.op == "and" else (found.keys,)
        yield from (part for part in parts if part != chosen.condition)


def _of_chosen(spec: AttentionSpec, count: int, mask: MaskSpec) -> AttentionSpec:
    """The spec of so many keys, as they lie when they are gathered."""

    def moved(x: TensorSpec) -> TensorSpec:
        batch, heads, _, dims = x.shape
        return dataclasses.replace(x, shape=(batch, heads, count, dims), strides=_strides(heads, count, dims))

    latent: LatentSpec | None = spec.latent
    if latent is not None:
        rope = None if latent.rope is None else moved(latent.rope)
        latent = dataclasses.replace(latent, latent=moved(latent.latent), rope=rope)
    return dataclasses.replace(spec, k=moved(spec.k), v=moved(spec.v), latent=latent, mask=mask)


def _strides(heads: Dim, count: int, dims: Dim) -> tuple[Dim, ...]:
    """Of (B, heads, count, dims) where the heads of a key lie side by side. Raises TypeError for sizes that are not known."""
    if not isinstance(heads, int) or not isinstance(dims, int):
        raise TypeError(f"why_not refuses unknown heads and head dims, got {heads!r} and {dims!r}")
    return (count * heads * dims, dims, heads * dims, 1)
