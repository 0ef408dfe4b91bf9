"""Attention sinks beside a call of FlexAttention, whose score_mod can't say them: the output is made smaller by what the logsumexp says.

With l the logsumexp of a query's scores and s the logit of its head's sink, the softmax over keys and sink is the softmax over the keys
times exp(l - log(exp l + exp s)). Models write that factor as it stands here, as transformers does, or as sigmoid(l - s).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph import relevance
from attn_compiler.passes.graph.calls import argument, is_pytorchs, target_name
from attn_compiler.spec.dtypes import EVERY
from attn_compiler.torch_private import symbols as torch_symbols

#: FlexAttention's own logsumexp is one of powers of two; its Python function multiplies by this
_LN_2 = math.log(2)
_CASTS = frozenset({"to", "float", "half", "bfloat16", "double", "type_as"})
#: calls that give a view of the logits, or their copy, and write nothing
_MOVES = frozenset(
    {"view", "reshape", "expand", "expand_as", "unsqueeze", "getitem", "__getitem__", "repeat", "contiguous"}
)
_ALONG = frozenset({"dim", "axis", "keepdim"})


@dataclass(frozen=True, kw_only=True, eq=False)
class FlexSinks:
    """logits: of each query's sink; broadcast over the attention without its head dim, or over that with an axis of 1 in its place.
    own: the model's attention with its sinks. nodes: what it is made of, from the call's outputs on.
    """

    logits: fx.Node
    own: fx.Node
    nodes: frozenset[fx.Node]


def find(call: fx.Node) -> FlexSinks | None:
    """What makes the attention of a call one with sinks; None where its logsumexp is used for nothing, or for something else."""
    outputs = {user.args[1]: user for user in call.users if user.target is operator.getitem}
    attention, lse = outputs.get(0), outputs.get(1)
    if attention is None or lse is None or len(outputs) != len(call.users):
        return None
    products = [user for user in attention.users if _calls(user, "mul") and len(user.args) == 2]
    found = (_with_factor(attention, lse, product) for product in products)
    return next((sinks for sinks in found if sinks is not None and _is_all(call, sinks)), None)


def column(logits: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The logits as one column beside the scores, in their dtype: cast before they are repeated, so that a head's are one number."""
    for axis, stride in enumerate(logits.stride()):
        logits = logits.narrow(axis, 0, 1) if torch_symbols.statically_known(stride == 0) else logits
    column = logits if logits.dim() == scores.dim() else logits.unsqueeze(-1)
    return column.to(scores.dtype).expand(*scores.shape[:-1], 1)


def _with_factor(attention: fx.Node, lse: fx.Node, product: fx.Node) -> FlexSinks | None:
    factors = [x for x in product.args if x is not attention]
    own = _in_dtype_of(attention, product)
    if len(factors) != 1 or not isinstance(factors[0], fx.Node) or own is None:
        return None
    read = _Reading(lse)
    logits = read.factor(factors[0])
    if logits is None or not _is_one_a_query(factors[0], attention) or not _fits(logits, attention):
        return None
    return FlexSinks(logits=logits, own=own, nodes=frozenset({attention, lse, product, own, *read.nodes}))


def _in_dtype_of(attention: fx.Node, product: fx.Node) -> fx.Node | None:
    """The product, or what casts it back to the attention's dtype if the factor was wider."""
    if _dtype(product) == _dtype(attention):
        return product
    readers = list(product.users)
    is_back = len(readers) == 1 and _is_cast(readers[0], product) and _dtype(readers[0]) == _dtype(attention)
    return readers[0] if is_back else None


class _Reading:
    """Reads a factor against the direction of the graph. nodes: those that it consists of, but for the logits."""

    def __init__(self, lse: fx.Node) -> None:
        self._lse = lse
        self.nodes: set[fx.Node] = set()

    def factor(self, node: fx.Node) -> fx.Node | None:
        """The logits of exp(l - log(exp l + exp s)) or sigmoid(l - s), each for each query; None for anything else."""
        node = self._uncast(node)
        if _calls(node, "exp"):
            return self._difference_of_two(_first(node))
        return self._difference(_first(node)) if _calls(node, "sigmoid") else None

    def _difference_of_two(self, node: fx.Node | None) -> fx.Node | None:
        pair = self._subtracted(node)
        if pair is None or not self._is_lse(pair[0]):
            return None
        joined = self._uncast(pair[1])
        if not _calls(joined, "logsumexp") or not _is_over_last(joined, keeps=True):
            return None
        self.nodes.add(joined)
        both = self._uncast(joined.args[0]) if isinstance(joined.args[0], fx.Node) else None
        if both is None or not (_calls(both, "cat") or _calls(both, "concat")) or not _is_over_last(both):
            return None
        self.nodes.add(both)
        parts: Any = argument(both, 0, "tensors")
        if not isinstance(parts, (list, tuple)) or len(parts) != 2 or not all(isinstance(x, fx.Node) for x in parts):
            return None
        others = [x for x in parts if not self._is_lse(x)]
        return others[0] if len(others) == 1 and all(_same(_shape(x)[-1:], (1,)) for x in parts) else None

    def _difference(self, node: fx.Node | None) -> fx.Node | None:
        pair = self._subtracted(node)
        return pair[1] if pair is not None and self._is_lse(pair[0]) else None

    def _subtracted(self, node: fx.Node | None) -> tuple[fx.Node, fx.Node] | None:
        """a and b of a - b, whose shape is a's."""
        node = None if node is None else self._uncast(node)
        if node is None or not _calls(node, "sub") or len(node.args) != 2:
            return None
        self.nodes.add(node)
        a, b = node.args
        return (a, b) if isinstance(a, fx.Node) and isinstance(b, fx.Node) and _is_shaped_by(a, b, node) else None

    def _uncast(self, node: fx.Node) -> fx.Node:
        """What a floating number was before it was cast, and before it got an axis of 1 in the end."""
        self.nodes.add(node)
        while isinstance(source := node.args[0] if node.args else None, fx.Node) and (
            _is_cast(node, source) or _is_unsqueezed(node, source)
        ):
            node = source
            self.nodes.add(node)
        return node

    def _is_lse(self, node: fx.Node) -> bool:
        """Whether it is the logsumexp of e; if so, its nodes are noted."""
        climbed = [node]
        while (source := _first(climbed[-1])) is not None and (
            _is_cast(climbed[-1], source) or _is_unsqueezed(climbed[-1], source)
        ):
            climbed.append(source)
        scaled = climbed[-1]
        if not _calls(scaled, "mul") or scaled.args not in ((self._lse, _LN_2), (_LN_2, self._lse)):
            return False
        self.nodes.update(climbed)
        return True


def _is_all(call: fx.Node, sinks: FlexSinks) -> bool:
    """Whether nothing else reads what the call gives, and nothing is written from the call to the end of the attention."""
    inside = sinks.nodes - {sinks.own}
    if not all(relevance.comes_to_nothing(node, besides=sinks.nodes) for node in inside):
        return False
    return all(node in sinks.nodes or _only_moves(node) for node in _between(call, sinks.own))


def _between(call: fx.Node, end: fx.Node) -> Iterator[fx.Node]:
    node = call.next
    while node is not end:
        yield node
        node = node.next


def _only_moves(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and target_name(node) in _MOVES | _CASTS


def _calls(node: fx.Node, name: str) -> bool:
    """Whether a node makes a new tensor by PyTorch's function of that name, and is told by name at most along which axis."""
    if target_name(node) != name or _value(node) is None or not node.kwargs.keys() <= _ALONG:
        return False
    return is_pytorchs(node)


def _first(node: fx.Node | None) -> fx.Node | None:
    return node.args[0] if node is not None and node.args and isinstance(node.args[0], fx.Node) else None


def _is_cast(node: fx.Node, source: fx.Node) -> bool:
    value, before = _value(node), _value(source)
    if value is None or before is None or target_name(node) not in _CASTS:
        return False
    return {value.dtype, before.dtype} <= set(EVERY) and value.device == before.device


def _is_unsqueezed(node: fx.Node, source: fx.Node) -> bool:
    """(..., n) to (..., n, 1)."""
    return target_name(node) == "unsqueeze" and node.args[1:] in ((-1,), (len(_shape(source)),))


def _is_over_last(node: fx.Node, *, keeps: bool | None = None) -> bool:
    last, dim = len(_shape(node)) - 1, argument(node, 1, "dim")
    if keeps is not None and argument(node, 2, "keepdim") is not keeps:
        return False
    return (dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim) in (-1, last)


def _is_one_a_query(factor: fx.Node, attention: fx.Node) -> bool:
    return _same(_shape(factor), (*_shape(attention)[:-1], 1))


def _is_shaped_by(a: fx.Node, b: fx.Node, result: fx.Node) -> bool:
    """Whether b broadcasts to a, axis by axis."""
    return _same(_shape(result), _shape(a)) and len(_shape(a)) == len(_shape(b))


def _fits(logits: fx.Node, attention: fx.Node) -> bool:
    """Whether logits broadcast to one for each query, with an axis of 1 in the end or without."""
    shape, queries = _shape(logits), _shape(attention)[:-1]
    if _dtype(logits) not in EVERY or len(shape) not in (3, 4) or not _same(shape[3:], (1,) * (len(shape) - 3)):
        return False
    return all(_same((x,), (1,)) or _same((x,), (whole,)) for x, whole in zip(shape[:3], queries, strict=True))


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(torch_symbols.statically_known(x == y) for x, y in zip(a, b, strict=True))


def _value(node: fx.Node) -> torch.Tensor | None:
    value = node.meta.get("example_value")
    return value if isinstance(value, torch.Tensor) else None


def _shape(node: fx.Node) -> tuple[Any, ...]:
    value = _value(node)
    return () if value is None else tuple(value.shape)


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = _value(node)
    return None if value is None else value.dtype
