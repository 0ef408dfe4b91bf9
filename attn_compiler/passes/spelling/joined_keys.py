"""One softmax over several sets of keys, such as a memory and a window: one attention over all keys, written beside it.

A model multiplies q with each set, joins the scores, and multiplies the weights with the joined values, or each part with its own values.
Beside this the pass writes the same over joined keys and values, where the mask of a set has zeros for the others. A kernel replaces both,
or the added form is erased again.

Keys and values are copied when joined: 8 bytes for each element of a key in half precision. The model's own scores cost about 12 bytes for
each query and key. So the model keeps a site with fewer queries than the head dim.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph import bodies, regions, strides
from attn_compiler.passes.graph.calls import Trying, argument, is_pytorchs, run, target_name, untried
from attn_compiler.passes.graph.spelling import JOINED, Spelled
from attn_compiler.passes.spelling import expand, products
from attn_compiler.passes.spelling.products import Product
from attn_compiler.torch_private import symbols as torch_symbols

_JOINS = frozenset({"cat", "concat", "concatenate"})
_SCALES = frozenset({"mul", "truediv", "div"})
_SPLITS = frozenset({"split", "split_with_sizes", "chunk", "tensor_split"})
_SOFTMAXES = frozenset({"softmax"})
#: most nodes expected between a product and a softmax, or between that and the next product
_FARTHEST = 24


class _NotJoined(Exception):
    """An apparent join of scores that is something else."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Mask:
    """A mask of one set's scores: `node` is added (fill None), or is True where `fill` replaces them."""

    node: fx.Node
    fill: Any = None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Set:
    """One set of keys. product: q kᵀ. scales: (name, number) of the factors of its scores before masks."""

    product: Product
    scales: tuple[tuple[str, Any], ...]
    masks: tuple[_Mask, ...]
    nodes: tuple[fx.Node, ...]

    @property
    def q(self) -> fx.Node:
        return self.product.left

    @property
    def keys(self) -> fx.Node:
        return self.product.right


@dataclass(frozen=True, kw_only=True, eq=False)
class _Joined:
    """way: from the joined scores to the weights, without `cat`. weighted: weights · values, of all or of each set. own: the attention."""

    cat: fx.Node
    sets: tuple[_Set, ...]
    way: tuple[fx.Node, ...]
    weighted: tuple[Product, ...]
    own: fx.Node
    nodes: frozenset[fx.Node]


def spell_joined(graph_module: fx.GraphModule, trying: Trying = untried) -> tuple[Spelled, ...]:
    """Write out every attention of one graph module whose scores are joined."""
    spelled: list[Spelled] = []

    def spell(cat: fx.Node, where: Mapping[fx.Node, regions.Region]) -> None:
        # Sites are read one by one, because writing out a layer changes the nodes that the next one reads.
        joined = _find(cat)
        if joined is None or where[cat].transforms or any(where[node] != where[cat] for node in joined.nodes):
            return
        with contextlib.suppress(_NotJoined):
            spelled.append(_spell_out(graph_module, joined))

    expand.each(graph_module, lambda node: _calls(node, _JOINS) and _find(node) is not None, spell, trying)
    return tuple(spelled)


def _find(cat: fx.Node) -> _Joined | None:
    try:
        joined = _read(cat)
        _check_shapes(joined)
        _check_untouched(joined)
    except _NotJoined:
        return None
    return joined


# ---- reading --------------------------------------------------------------------------------------------------------


def _read(cat: fx.Node) -> _Joined:
    parts: Any = argument(cat, 0, "tensors")
    if not isinstance(parts, (list, tuple)) or len(parts) < 2 or len(set(parts)) != len(parts):
        raise _NotJoined
    if argument(cat, 1, "dim") not in (-1, _rank(cat) - 1):
        raise _NotJoined
    sets = tuple(_read_set(part) for part in parts)
    if len({(one.q, one.product.equation, one.scales) for one in sets}) != 1 or sets[0].product.free is None:
        raise _NotJoined
    way = [cat]
    while len(way) < _FARTHEST:
        readers = list(way[-1].users)
        if any(_calls(node, _SOFTMAXES) for node in way) and (ends := _ends(way[-1], sets)) is not None:
            weighted, own, inside = ends
            nodes = {*way, own, *inside, *(node for one in sets for node in one.nodes)}
            return _Joined(cat=cat, sets=sets, way=tuple(way[1:]), weighted=weighted, own=own, nodes=frozenset(nodes))
        if len(readers) != 1 or not _is_tensor(readers[0]) or readers[0].op not in ("call_function", "call_method"):
            raise _NotJoined
        way.append(readers[0])
    raise _NotJoined


def _read_set(part: fx.Node) -> _Set:
    """Read up from a part of the scores to its product, through masks and then scales only. Nothing else may read these nodes."""
    scales: list[tuple[str, object]] = []
    masks: list[_Mask] = []
    nodes: list[fx.Node] = []
    node = part
    while len(nodes) < _FARTHEST:
        if not isinstance(node, fx.Node) or not _is_tensor(node) or len(node.users) != 1:
            raise _NotJoined
        nodes.append(node)
        product = products.read(node)
        if product is not None:
            return _Set(product=product, scales=tuple(scales[::-1]), masks=tuple(masks[::-1]), nodes=tuple(nodes))
        if node.kwargs or len(node.args) < 2:
            raise _NotJoined
        mask = _mask(node)
        if mask is not None and not scales:
            masks.append(mask)
        elif _calls(node, _SCALES) and len(node.args) == 2 and not _is_tensor(node.args[1]):
            scales.append((target_name(node), node.args[1]))
        else:
            raise _NotJoined
        node = node.args[0]  # type: ignore[assignment]
    raise _NotJoined


def _mask(node: fx.Node) -> _Mask | None:
    other = node.args[1]
    if not isinstance(other, fx.Node) or not _is_tensor(other):
        return None
    if _calls(node, {"masked_fill"}) and len(node.args) == 3 and not isinstance(node.args[2], fx.Node):
        return _Mask(node=other, fill=node.args[2])
    is_added = _calls(node, {"add"}) and len(node.args) == 2 and _value(other).dtype == _value(node).dtype
    return _Mask(node=other) if is_added else None


def _ends(weights: fx.Node, sets: Sequence[_Set]) -> tuple[tuple[Product, ...], fx.Node, list[fx.Node]] | None:
    """Return (products, attention, nodes before it) if the weights multiply values as a whole or set by set, else None."""
    readers = list(weights.users)
    whole = _product_of(readers[0], weights) if len(readers) == 1 else None
    if whole is not None:
        return (whole,), whole.node, []
    parts = _parts(weights, sets)
    if parts is None:
        return None
    found = [_product_of(next(iter(part.users)), part) if len(part.users) == 1 else None for part in parts]
    weighted = tuple(product for product in found if product is not None)
    if len(weighted) != len(parts) or len({product.equation for product in weighted}) != 1:
        return None
    own, sums = products.summed_up([product.node for product in weighted])
    return None if own is None else (weighted, own, [*readers, *parts, *(x.node for x in weighted), *sums])


def _product_of(node: fx.Node, weights: fx.Node) -> Product | None:
    """Return the product that sums over the last axis of the weights, if the node is one."""
    product = products.read(node)
    return product if product is not None and product.left is weights and product.summed is not None else None


def _parts(weights: fx.Node, sets: Sequence[_Set]) -> list[fx.Node] | None:
    """Return the part of each set, in order: a slice of the last axis for each, or a split into them."""
    readers = list(weights.users)
    if len(readers) == 1 and _calls(readers[0], _SPLITS):
        items = {user.args[1]: user for user in readers[0].users if target_name(user) == "getitem"}
        if len(items) != len(readers[0].users) or sorted(map(str, items)) != sorted(map(str, range(len(sets)))):
            return None
        parts = [items[i] for i in range(len(sets))]
        starts = list(itertools.accumulate((_value(part).shape[-1] for part in parts), initial=0))
    else:
        found = {node: _start(node, weights) for node in readers}
        if len(found) != len(sets) or any(start is None for start in found.values()):
            return None
        parts, starts = [], []
        begin: Any = 0
        for one in sets:
            at = [node for node, start in found.items() if torch_symbols.statically_known(start == begin)]
            if len(at) != 1:
                return None
            parts.append(at[0])
            starts.append(begin)
            begin = begin + _value(one.product.node).shape[-1]
    fits = all(_same(_value(part).shape, _value(one.product.node).shape) for part, one in zip(parts, sets, strict=True))
    return parts if fits else None


def _start(node: fx.Node, weights: fx.Node) -> Any:
    """Return the start of a slice of the last axis; None for anything else."""
    if target_name(node) != "getitem" or node.args[0] is not weights or not isinstance(node.args[1], tuple):
        return None
    *before, last = node.args[1]
    if not isinstance(last, slice) or last.step not in (None, 1):
        return None
    rank = _rank(weights)
    is_last = before == [Ellipsis] or (len(before) == rank - 1 and all(x == slice(None) for x in before))
    start = last.start.meta["example_value"] if isinstance(last.start, fx.Node) else last.start
    if not is_last:
        return None
    start = 0 if start is None else start
    if not isinstance(start, (int, torch.SymInt)):
        return None
    if torch_symbols.statically_known(start >= 0):
        return start
    return start + _value(weights).shape[-1] if torch_symbols.statically_known(start < 0) else None


# ---- whether it is one attention ------------------------------------------------------------------------------------


def _check_shapes(joined: _Joined) -> None:
    """Require keys and values that differ only in their number, and enough queries. Raises _NotJoined."""
    first = joined.sets[0].product
    scores, q = _value(first.node), _value(first.left)
    if first.left_summed is None or torch_symbols.statically_known(scores.shape[-2] < q.shape[first.left_summed]):
        raise _NotJoined
    if any(_value(one.product.node).dtype != scores.dtype for one in joined.sets):
        raise _NotJoined
    _check_alike([one.keys for one in joined.sets], first.free)
    _check_alike([product.right for product in joined.weighted], joined.weighted[0].summed)


def _check_alike(nodes: Sequence[fx.Node], axis: int | None) -> None:
    """Require one dtype and one shape, except along an axis. Raises _NotJoined."""
    values = [_value(node) for node in nodes]
    for value in values:
        shapes = [
            tuple(1 if i - x.dim() == axis else size for i, size in enumerate(x.shape)) for x in (value, values[0])
        ]
        if value.dtype != values[0].dtype or not _same(*shapes):
            raise _NotJoined


def _check_untouched(joined: _Joined) -> None:
    """Refuse a change of grad mode between the first product and the attention, and a write except to nodes made there (_NotJoined)."""
    for node in _between(joined):
        is_own = node in joined.nodes and set(bodies.writes(node)) <= joined.nodes
        # A call that gives no value switches a mode.
        gives = node.op != "call_function" or node.meta.get("example_value") is not None
        if not is_own and (bodies.writes(node) or not gives):
            raise _NotJoined


def _between(joined: _Joined) -> Iterator[fx.Node]:
    node = next(node for node in joined.cat.graph.nodes if node in joined.nodes)
    while node is not joined.own:
        yield node
        node = node.next
    yield node


# ---- spelling it out ------------------------------------------------------------------------------------------------


def _spell_out(graph_module: fx.GraphModule, joined: _Joined) -> Spelled:
    outside = [x for node in joined.way for x in node.all_input_nodes if x not in joined.nodes]
    masks = [mask.node for one in joined.sets for mask in one.masks]
    scales = [number for _, number in joined.sets[0].scales if isinstance(number, fx.Node)]
    keys = [one.keys for one in joined.sets]
    weighted = joined.weighted
    inputs = list(dict.fromkeys([joined.sets[0].q, *keys, *(x.right for x in weighted), *masks, *scales, *outside]))

    def function(*given: Any) -> Any:
        values = dict(zip(inputs, given, strict=True))
        values[joined.cat] = _scores(joined, values)
        for node in joined.way:
            values[node] = run(node, values.__getitem__)
        return weighted[0].of(values[joined.way[-1]], _joined([values[x.right] for x in weighted], weighted[0].summed))

    own, wanted = joined.own, _value(joined.own)

    def check(product: fx.Node) -> None:
        if _value(product).dtype != wanted.dtype or not strides.same(_value(product), wanted):
            raise _NotJoined

    product, made = expand.beside(graph_module, own, function, inputs, check)
    own.replace_all_uses_with(product)
    return Spelled(
        call=joined.cat,
        own=own,
        product=product,
        out=product,
        nodes=made,
        pattern=JOINED,
        decomposed=True,
        replaced=tuple(node for node in _between(joined) if node in joined.nodes),
        note=f"the keys and values of {len(keys)} parts are joined, which copies them",
    )


def _scores(joined: _Joined, values: Mapping[fx.Node, Any]) -> torch.Tensor:
    product = joined.sets[0].product
    scores = product.of(values[product.left], _joined([values[one.keys] for one in joined.sets], product.free))
    for name, number in joined.sets[0].scales:
        factor = values[number] if isinstance(number, fx.Node) else number
        scores = scores * factor if name == "mul" else scores / factor
    for place, one in enumerate(joined.sets):
        for mask in one.masks:
            whole = _among(values[mask.node], joined.sets, place, values)
            scores = scores + whole if mask.fill is None else scores.masked_fill(whole, mask.fill)
    return scores


def _joined(tensors: Sequence[torch.Tensor], axis: int | None) -> torch.Tensor:
    """Join tensors along an axis. The last axis of transposed tensors is the last but one in memory."""
    if axis is None or len(tensors) == 1:
        return tensors[0]
    return torch.cat([x.mT for x in tensors], -2).mT if axis == -1 else torch.cat(list(tensors), axis)


def _among(mask: torch.Tensor, sets: Sequence[_Set], place: int, values: Mapping[fx.Node, Any]) -> torch.Tensor:
    """Place the mask of one set among zeros for the others."""
    sizes = [values[one.keys].shape[one.product.free] for one in sets]
    zeros = [mask.new_zeros((*mask.shape[:-1], size)) for size in sizes]
    zeros[place] = mask.expand(*mask.shape[:-1], sizes[place])
    return torch.cat(zeros, -1)


# ---- nodes ----------------------------------------------------------------------------------------------------------


def _calls(node: object, names: frozenset[str] | set[str]) -> bool:
    return isinstance(node, fx.Node) and target_name(node) in names and is_pytorchs(node)


def _is_tensor(node: object) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("example_value"), torch.Tensor)


def _value(node: Any) -> torch.Tensor:
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        raise _NotJoined
    return value


def _rank(node: fx.Node) -> int:
    return _value(node).dim()


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(torch_symbols.statically_known(x == y) for x, y in zip(a, b, strict=True))
