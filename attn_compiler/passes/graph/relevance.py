"""The nodes of a Dynamo graph that the mirror need not look into: most of a transformer is no attention, and tracing it costs time.

A node is skipped only if it is known to compute a new tensor and to write nothing. So skipping can hide an attention (a miss), but never
a view or a mutation. Around every anchor, all nodes that matching and mask recovery look at are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from attn_compiler.passes.graph import axes, bodies, mutation
from attn_compiler.passes.graph.calls import argument, target_name

Writers = dict[StorageWeakRef, list[fx.Node]]

#: calls that end the walk up or down from an anchor: beyond them is another computation
_BOUNDARIES = frozenset(
    "linear addmm conv1d conv2d conv3d layer_norm rms_norm batch_norm group_norm cross_entropy cross_entropy_loss".split()
)

#: calls that make a new tensor from any inputs
_MAKES_NEW = _BOUNDARIES | frozenset(
    "add sub mul truediv div pow neg mean var rsqrt sqrt exp erf cos sin sigmoid silu gelu relu tanh softplus cat square".split()
)

_PRODUCTS = frozenset("matmul bmm mm baddbmm addmm einsum tensordot __matmul__".split())
#: products with an addend, which is the first argument
_WITH_ADDEND = frozenset("baddbmm addmm".split())
_SCALES = frozenset("mul truediv div".split())
_OPERANDS = ("query", "key", "value")
_STEPS_DOWN = 8


def skippable(
    graph: fx.Graph, is_anchor: Callable[[fx.Node], bool], masks: Iterable[fx.Node] = ()
) -> frozenset[fx.Node]:
    """Return the nodes that a mirror may treat as opaque. masks: nodes that called bodies may make their masks of."""
    scores, operands = _kept(graph, is_anchor, masks)
    return frozenset(n for n in graph.nodes if n not in scores and n not in operands and _makes_new(n))


def mask_inputs(
    graph: fx.Graph, is_anchor: Callable[[fx.Node], bool], masks: Iterable[fx.Node] = ()
) -> frozenset[fx.Node]:
    """Return the inputs of a graph that its masks, or those of bodies that it calls, may be made of."""
    scores, _ = _kept(graph, is_anchor, masks)
    return frozenset(node for node in scores if node.op == "placeholder")


def comes_to_nothing(node: fx.Node, *, besides: frozenset[fx.Node] = frozenset()) -> bool:
    """Return whether a Dynamo node's value reaches nothing: only calls that make new tensors read it, and nobody reads those.

    besides: readers that do not count.
    """
    readers = [reader for reader in node.users if reader not in besides]
    return all((_makes_new(reader) or target_name(reader) == "to") and comes_to_nothing(reader) for reader in readers)


def _makes_new(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    called = node.op in ("call_function", "call_method")
    known = called and isinstance(value, torch.Tensor) and target_name(node) in _MAKES_NEW
    # The example value of a result that changes its shape in place later (`transpose_`) shows the last shape.
    is_reshaped = any(mutation.views_in_place(target_name(user)) for user in node.users)
    # A tensor that exists only inside a transform of torch.func can't stand for itself.
    return known and bodies.has_known_memory(value) and not _may_write(node) and not is_reshaped


def _may_write(node: fx.Node) -> bool:
    """Recognise F.relu(x, inplace=True), torch.add(..., out=x), or another library's op with a familiar name."""
    foreign = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace != "aten"
    in_place = any(arg is True for arg in (*node.args, node.kwargs.get("inplace")))
    return foreign or in_place or "out" in node.kwargs


def _kept(
    graph: fx.Graph, is_anchor: Callable[[fx.Node], bool], masks: Iterable[fx.Node]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return two sets: the anchors and all that makes scores and masks; the operands of both products, up to where they are computed."""
    scores: set[fx.Node] = set()
    operands: set[fx.Node] = set()
    anchors = [node for node in graph.nodes if is_anchor(node)]
    writers = _writers(graph) if anchors or masks else {}
    for anchor in anchors:
        is_decoding = _has_other_lengths(anchor)
        if "scaled_dot_product" in target_name(anchor):
            scores.add(anchor)
            given = [argument(anchor, i, name) for i, name in enumerate(_OPERANDS)]
            _climb_operands(given, operands, is_decoding=is_decoding)
            others = (x for name, x in anchor.kwargs.items() if name not in _OPERANDS)
            _climb_scores([*anchor.args[3:], *others], scores, operands, writers)
        else:
            start = [anchor, *_products_below(anchor)]
            _climb_scores(start, scores, operands, writers, is_decoding=is_decoding)
    # What is made of a logsumexp may be sinks of the softmax beside it.
    sums = [node for node in graph.nodes if anchors and target_name(node) == "logsumexp"]
    _climb_scores([x for node in sums for x in (node, *_products_below(node))], scores, operands, writers)
    _climb_scores(masks, scores, operands, writers)
    return scores, operands


def _has_other_lengths(anchor: fx.Node) -> bool:
    """Return whether there may be more keys than queries, as in decoding: there the sources of k and v are looked at (latent.py)."""
    fused = "scaled_dot_product" in target_name(anchor)
    nodes = [argument(anchor, i, name) for i, name in enumerate(_OPERANDS[:2])] if fused else [anchor]
    found = [x.meta.get("example_value") if isinstance(x, fx.Node) else None for x in nodes]
    values = [value for value in found if isinstance(value, torch.Tensor) and value.dim() > 1]
    if len(values) < len(nodes):
        return True
    sizes = [value.shape[-2] for value in values] if fused else values[0].shape[-2:]
    return not axes.same_size(*map(axes.size_expr, sizes))


def _writers(graph: fx.Graph) -> Writers:
    """Return the calls that may write in place into each storage: no argument of another node leads to them (`mask[:, :n] = other`)."""
    found: Writers = {}
    for node in graph.nodes:
        written = [] if bodies.is_higher_order(node) else bodies.writes(node)
        for storage in set().union(*map(_memory, written)):
            found.setdefault(storage, []).append(node)
    return found


def _memory(node: fx.Node) -> set[StorageWeakRef]:
    value = node.meta.get("example_value")
    return mutation.storages_of(value) if bodies.has_known_memory(value) else set()


def _climb_scores(
    start: Iterable[object],
    scores: set[fx.Node],
    operands: set[fx.Node],
    writers: Writers,
    *,
    is_decoding: bool = False,
) -> None:
    queue = [node for node in start if isinstance(node, fx.Node)]
    while queue:
        node = queue.pop()
        name = target_name(node)
        ends = name in _BOUNDARIES and name not in _PRODUCTS
        if node in scores or ends or isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        scores.add(node)
        if name in _PRODUCTS:
            _climb_operands(node.all_input_nodes, operands, is_decoding=is_decoding)
            added = argument(node, 0, "input") if name in _WITH_ADDEND else None
            queue.extend([added] if isinstance(added, fx.Node) else [])
        else:
            queue.extend(node.all_input_nodes)
        if writers:
            queue.extend(writer for storage in _memory(node) for writer in writers.get(storage, ()))


def _climb_operands(start: Iterable[object], operands: set[fx.Node], *, is_decoding: bool) -> None:
    """Climb from q, k and v through views and scales, which is as far as matching goes.

    is_decoding: also through concatenations, up to the projections.
    """
    followed = _SCALES | {"cat"} if is_decoding else _SCALES
    queue = [node for node in start if isinstance(node, fx.Node)]
    while queue:
        node = queue.pop()
        name = target_name(node)
        if node in operands:
            continue
        if name == "linear" and is_decoding:
            # Its input may be read in place of k and v.
            operands.add(node)
        elif not _makes_new(node) or name in followed:
            operands.add(node)
            queue.extend(node.all_input_nodes)


def _products_below(anchor: fx.Node) -> list[fx.Node]:
    """Return the products that an anchor's result flows into, and the nodes on the way there."""
    reached: list[fx.Node] = []
    level = [anchor]
    for _ in range(_STEPS_DOWN):
        level = [u for node in level for u in node.users if target_name(u) not in _BOUNDARIES]
        reached.extend(level)
        level = [node for node in level if target_name(node) not in _PRODUCTS]
    return reached
