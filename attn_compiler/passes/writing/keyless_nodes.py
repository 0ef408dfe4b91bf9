"""Nodes that give a query without keys the model's result (keyless.py), whatever the kernel gave."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Expr, Index, Test, on_nodes
from attn_compiler.index_expr.on_nodes import Names, size_of
from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.base import OF_CACHE, Emitter, Operands
from attn_compiler.passes.graph.site import Keyless
from attn_compiler.passes.recovering import kinds
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.dtypes import computed_in
from attn_compiler.spec.target import Target

aten = torch.ops.aten

NOTE = "queries without keys get the mean of v, as the model's softmax over one finite number gives it"
NOTE_NUMBERS = "queries without keys get what the model's softmax over the numbers that mask gives them"
NOTE_CHANGED = "q and k get no gradient from queries without keys: each score has a change of its own"
NOTE_OF_CACHE = "queries without keys give 0: what the model gives them would read the whole cache in each step"
NOTE_BIAS = "a bias gets no gradient from queries without keys"

#: site axes of the indices
_AXES = {"b": 0, "h": 1, "q": 2, "k": 3}
#: beyond every key
_FAR = 2**62


def asked_for(spec: AttentionSpec, keyless: Keyless | None, lowering: str, target: Target) -> AttentionSpec:
    """Return the spec that a lowering is to serve, which may ask its kernel for the rows without keys.

    It asks over a cache, and where q and k get a gradient from such rows. Elsewhere nodes cost less
    (benchmarks/results/keyless_cost_h200.csv).
    """
    if spec.mask.own_rows is not None or spec.lse != "unread" or (keyless is None and not spec.adds_unread):
        return spec
    if keyless is not None and (keyless.numbers is not None or keyless.own is not None or keyless.by_tensor):
        return spec
    through = spec.needs_grad and spec.score.pointwise is None and (keyless is None or keyless.through)
    if not (through or lowering in OF_CACHE) or not by_name(lowering).gives_means(spec, target):
        return spec
    return dataclasses.replace(spec, mask=dataclasses.replace(spec.mask, means=True))


def tell(emitter: Emitter, spec: AttentionSpec, keyless: Keyless | None) -> None:
    """Note the result of rows without keys. None: by numbers that were not read."""
    emitter.note(NOTE if keyless is None or keyless.numbers is None else NOTE_NUMBERS)
    if keyless is not None and (keyless.numbers is not None or not (keyless.through and spec.needs_grad)):
        return
    if spec.score.pointwise is not None:
        emitter.note(NOTE_CHANGED)
    elif spec.score.bias is not None and spec.score.bias.requires_grad:
        emitter.note(NOTE_BIAS)


def completed(emitter: Emitter, spec: AttentionSpec, keyless: Keyless, operands: Operands, out: fx.Node) -> fx.Node:
    """Return the kernel's output (B, Hq, Sq, Dv), with the model's own rows where a query has no key."""
    if keyless.by_tensor:
        return _completed_by_tensor(emitter, spec, operands, out)
    has_keys = with_keys(emitter, spec, keyless, operands)
    tell(emitter, spec, keyless)
    rows = _mean(emitter, spec, keyless, operands, out) if keyless.numbers is None else _weighed(
        emitter, spec, keyless.numbers, operands, out
    )  # fmt: skip
    return emitter.call(torch.where, has_keys, out, rows)


def _completed_by_tensor(emitter: Emitter, spec: AttentionSpec, operands: Operands, out: fx.Node) -> fx.Node:
    """Return the same where the added numbers tell which rows have no key, and what those rows get."""
    mask = operands.mask
    if mask is None:
        raise ValueError("numbers that mask are a tensor of their own")
    dtype = emitter.value(out).dtype
    numbers = _as_four(emitter, mask)

    def keys() -> fx.Node:
        return emitter.call(torch.eq, emitter.call(torch.amax, numbers, -1, True), 0)

    def rows() -> fx.Node:
        found = emitter.call(aten._safe_softmax.default, _cast(emitter, numbers, computed_in(dtype)), -1)
        return _cast(emitter, found, dtype)

    has_keys = emitter.once(("has keys by numbers", mask), keys)
    weights = emitter.once(("weights by numbers", mask, dtype), rows)
    emitter.note(NOTE_NUMBERS)
    v = _for_each_head(emitter, spec, _cast(emitter, operands.v, dtype))
    return emitter.call(torch.where, has_keys, out, emitter.call(torch.matmul, weights, v))


# ---- rows without keys --------------------------------------------------------------------------------------------


def with_keys(emitter: Emitter, spec: AttentionSpec, keyless: Keyless, operands: Operands) -> fx.Node:
    """Return truth values (B|1, Hq|1, Sq|1, 1): whether a query has keys. Made once for all layers."""
    if keyless.allowed is None or not _at_hand(spec, keyless.allowed, operands):
        key: tuple[object, ...] = ("has keys", operands.mask, keyless.highest)
        return emitter.once(key, lambda: _by_tensor(emitter, keyless, operands))
    allowed = keyless.allowed
    sizes = (spec.batch, spec.num_heads_q, spec.seqlen_q, spec.seqlen_kv)
    loads = tuple(sorted((name, n.name) for name, n in operands.loads.items()))
    return emitter.once(("has keys", allowed, sizes, loads), lambda: _by_condition(emitter, spec, allowed, operands))


def _by_tensor(emitter: Emitter, keyless: Keyless, operands: Operands) -> fx.Node:
    mask = operands.mask
    if mask is None:
        raise ValueError("a mask that was not read is a tensor of its own")
    if emitter.value(mask).dtype != torch.bool:
        mask = emitter.call(torch.gt, mask, keyless.highest / 2)
    return emitter.call(torch.any, _as_four(emitter, mask), -1, True)


def _as_four(emitter: Emitter, x: fx.Node) -> fx.Node:
    """Add axes at the front, up to four."""
    missing = range(4 - emitter.value(x).dim())
    return functools.reduce(lambda y, _: emitter.call(torch.unsqueeze, y, 0), missing, x)


def _by_condition(emitter: Emitter, spec: AttentionSpec, allowed: Expr, operands: Operands) -> fx.Node:
    """Return whether a query has keys, by a condition. A part on keys alone is computed once for each batch row.

    If all other parts are diagonals, the first allowed key decides.
    """
    parts = kinds.conjuncts(allowed)
    of_queries = [part for part in parts if not ix.mentions(part, Index("k"))]
    of_keys = [part for part in parts if ix.mentions(part, Index("k")) and not ix.mentions(part, Index("q"))]
    both = [part for part in parts if ix.mentions(part, Index("k")) and ix.mentions(part, Index("q"))]
    places = _Places(emitter, spec, operands)
    diagonals = [_last_key(part) for part in both]
    if all(last is not None for last in diagonals):
        found = _any(emitter, places.truth(ix.apply("and", *of_keys))) if of_keys else None
        if both:
            keys = places.index("k")
            first = keys if not of_keys else emitter.call(
                torch.where, places.truth(ix.apply("and", *of_keys)), keys, _FAR
            )  # fmt: skip
            first = emitter.call(torch.amin, first, -1, True)
            reached = [emitter.call(torch.le, first, places.number(last)) for last in diagonals if last is not None]
            found = functools.reduce(lambda a, b: emitter.call(torch.logical_and, a, b), reached)
    else:
        found = _any(emitter, places.truth(ix.apply("and", *of_keys, *both)))
    if of_queries:
        own = places.truth(ix.apply("and", *of_queries))
        found = own if found is None else emitter.call(torch.logical_and, own, found)
    if found is None:
        raise ValueError("a mask that lets everything through leaves no row without keys")
    return found


def _any(emitter: Emitter, truth: fx.Node) -> fx.Node:
    return emitter.call(torch.any, truth, -1, True)


def _last_key(part: Expr) -> Expr | None:
    """Return r of k <= r, where r does not depend on the key."""
    if not isinstance(part, Test) or part.relation != ">=":
        return None
    if dict(part.form.terms).get(Index("k")) != -1:
        return None
    rest = ix.combine(part.form, ix.linear(Index("k")), 1)
    return None if ix.mentions(rest, Index("k")) else ix.add(rest, ix.ZERO)


def _at_hand(spec: AttentionSpec, x: Expr, operands: Operands) -> bool:
    """Return whether the site has all tensors and sizes that an expression reads."""
    tensors = {load.tensor for load in ix.loads(x)}
    known = {*operands.sizes, *(size for size in _sizes_of(spec) if isinstance(size, str))}
    return tensors <= operands.loads.keys() and ix.sizes(x) <= known


def _sizes_of(spec: AttentionSpec) -> tuple[int | str, ...]:
    return (spec.batch, spec.num_heads_q, spec.seqlen_q, spec.seqlen_kv)


class _Places:
    """Expressions over (b, h, q, k) of a site as nodes that broadcast to (B, Hq, Sq, Skv)."""

    def __init__(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> None:
        self._emitter = emitter
        self._spec = spec
        self._operands = operands
        self._device = emitter.value(operands.q).device
        self._indices: dict[str, fx.Node] = {}

    def truth(self, x: Expr) -> fx.Node:
        return _as_four(self._emitter, on_nodes.emit(self._emitter, ix.as_bool(x), self._names(x)))

    def number(self, x: Expr, real: torch.dtype = torch.float64) -> fx.Node:
        return _as_four(self._emitter, on_nodes.emit(self._emitter, x, self._names(x), real=real))

    def index(self, name: str) -> fx.Node:
        if name not in self._indices:
            count = self._emitter.call(torch.arange, self._size(_AXES[name]), device=self._device)
            shape = tuple(-1 if axis == _AXES[name] else 1 for axis in range(4))
            self._indices[name] = self._emitter.call(torch.Tensor.view, count, shape)
        return self._indices[name]

    def _size(self, axis: int) -> int | fx.Node:
        return size_of(self._emitter, *self._sized(axis))

    def _sized(self, axis: int) -> tuple[fx.Node, int]:
        """Return a node and its axis that has the size of an axis of the site."""
        return (self._operands.k, 2) if axis == _AXES["k"] else (self._operands.q, axis)

    def _names(self, x: Expr) -> Names:
        indices = {name: self.index(name) for name in _AXES if ix.mentions(x, Index(name))}
        own = {size: axis for axis, size in enumerate(_sizes_of(self._spec)) if isinstance(size, str)}
        sizes = {name: self._size(own[name]) for name in ix.sizes(x) - self._operands.sizes.keys()}
        sized = {name: self._sized(_AXES[name]) for name in indices}
        counted = {name: self._emitter.value(node).shape[own] for name, (node, own) in sized.items()}
        given = {name: size for name, size in self._operands.sizes.items() if name in ix.sizes(x)}
        sizes |= {name: size_of(self._emitter, size.node, size.axis) for name, size in given.items()}
        return Names(device=self._device, indices=indices, sizes=sizes, tensors=self._operands.loads, counted=counted)


# ---- their results ------------------------------------------------------------------------------------------------


def _mean(emitter: Emitter, spec: AttentionSpec, keyless: Keyless, operands: Operands, out: fx.Node) -> fx.Node:
    """Return the mean of v, (B, Hq, 1 or Sq, Dv)."""
    dtype = emitter.value(out).dtype
    wide = computed_in(dtype)
    # Without any keys the sum is 0, as the model's is.
    over_keys = torch.sum if emitter.value(operands.v).shape[2] == 0 else torch.mean
    mean = emitter.call(over_keys, operands.v, 2, keepdim=True, dtype=wide)
    # These rows give q and k no gradient.
    if not (keyless.through and spec.needs_grad and spec.score.pointwise is None):
        return _for_each_head(emitter, spec, _cast(emitter, mean, dtype))
    nothing = emitter.call(
        torch.ops.attn_compiler.keyless_gradient.default, operands.q, operands.k, operands.v, spec.score.scale
    )
    rows = emitter.call(torch.add, _for_each_head(emitter, spec, mean), nothing)
    return emitter.call(torch.Tensor.to, rows, dtype)


def _weighed(emitter: Emitter, spec: AttentionSpec, numbers: Expr, operands: Operands, out: fx.Node) -> fx.Node:
    """Return the softmax over the numbers, times v, (B, Hq, Sq, Dv). The weights are the same for all layers."""
    dtype = emitter.value(out).dtype
    wide = computed_in(dtype)
    loads = tuple(sorted((name, n.name) for name, n in operands.loads.items()))
    key = ("weights without keys", numbers, _sizes_of(spec), loads, dtype)

    def weights() -> fx.Node:
        found = _Places(emitter, spec, operands).number(numbers, wide)
        if not ix.mentions(numbers, Index("k")):
            found = emitter.call(torch.Tensor.expand, found, -1, -1, -1, size_of(emitter, operands.k, 2))
        return _cast(emitter, emitter.call(aten._safe_softmax.default, found, -1), dtype)

    v = _for_each_head(emitter, spec, _cast(emitter, operands.v, dtype))
    return emitter.call(torch.matmul, emitter.once(key, weights), v)


def _for_each_head(emitter: Emitter, spec: AttentionSpec, x: fx.Node) -> fx.Node:
    """Repeat (B, Hkv, ...) to (B, Hq, ...) where query heads share one of v's."""
    heads_kv, heads_q = emitter.value(x).shape[1], spec.num_heads_q
    if not spec.is_gqa or not isinstance(heads_q, int) or heads_kv == 1:
        return x
    return emitter.call(torch.repeat_interleave, x, heads_q // heads_kv, 1)


def _cast(emitter: Emitter, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return x if emitter.value(x).dtype == dtype else emitter.call(torch.Tensor.to, x, dtype)
