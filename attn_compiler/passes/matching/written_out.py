"""Attention with a written-out softmax, as a miss: `exp(s - max) / sum`, `exp(s - logsumexp(s))`, `log_softmax(s).exp()`.

The search uses Dynamo's own nodes, so a graph without other attention needs no mirror. Three parts are required. The exp has a product of
two computed tensors (q kᵀ) above it. The weights sum to one. A product with a third tensor (v) sums over the same axis. Routers, losses,
samplers and kernels of distances lack one of the three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.calls import argument, target_name
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason

_EXPONENTIALS = frozenset("exp exp_ exp2 exp2_".split())
_PRODUCTS = frozenset("matmul bmm mm baddbmm einsum __matmul__ __rmatmul__ tensordot".split())
_DIVISIONS = frozenset("truediv div div_ itruediv divide true_divide __truediv__".split())
_SUBTRACTIONS = frozenset("sub sub_ isub subtract".split())
#: ops that keep the elements, perhaps at other places
_VIEWS = frozenset(
    "to float half bfloat16 double type type_as view reshape unsqueeze squeeze transpose permute swapaxes movedim contiguous clone "
    "expand expand_as flatten unflatten getitem getattr detach view_as chunk split t".split()
)
#: ops allowed between the product and the softmax, or between the softmax and the product with v
_STEPS = (
    _VIEWS
    | _DIVISIONS
    | _SUBTRACTIONS
    | frozenset(
        "add add_ iadd mul mul_ imul multiply neg neg_ masked_fill masked_fill_ where clamp clamp_ clip clamp_min clamp_max tanh dropout "
        "dropout_ nan_to_num nan_to_num_ log_softmax minimum maximum normalize".split()
    )
)
#: ops that add a column of sinks to the scores
_JOINS = frozenset({"cat", "concat", "concatenate"})
#: ops allowed between a sum and the division by it
_OF_SUMS = _STEPS | frozenset("reciprocal reciprocal_ pow __pow__".split())
_TURNS = frozenset("transpose mT swapaxes t".split())
_MOVES = frozenset("permute movedim view reshape flatten unflatten chunk split".split())
_FARTHEST = 24


@dataclass(frozen=True, kw_only=True, eq=False)
class WrittenOut:
    """exp: the node that turns scores into weights. scores: the product q kᵀ. how: the model's form of the softmax."""

    exp: fx.Node
    scores: fx.Node
    how: str

    @property
    def reason(self) -> Reason:
        return Reason(
            code=Code.WRITTEN_BY_HAND,
            rule="the softmax of an attention is one call of PyTorch's",
            observed=f"it is written out as {self.how}",
        )


def find(graph: fx.Graph) -> list[WrittenOut]:
    """Return each attention of one Dynamo graph with a written-out softmax, once, in graph order."""
    found: dict[fx.Node, WrittenOut] = {}
    for node in graph.nodes:
        if _is_call(node, _EXPONENTIALS):
            one = _written(node)
            if one is not None:
                found.setdefault(one.scores, one)
    return list(found.values())


def _written(exp: fx.Node) -> WrittenOut | None:
    above = _above(exp, _STEPS | _JOINS)
    scores = next((x for x in above if is_product(x) and (_is_like(x, exp) or _is_one_wider(exp, x))), None)
    if scores is None:
        return None
    normalised = _normalised(exp)
    if normalised is None:
        return None
    how, axis = normalised
    products = [step for step in _below(exp, _STEPS) if is_product(step.reader)]
    if not any(_sums_over(step, axis) for step in products):
        return None
    return WrittenOut(exp=exp, scores=scores, how=how)


# ---- weights that sum to one ----------------------------------------------------------------------------------------


def _normalised(exp: fx.Node) -> tuple[str, int | None] | None:
    """Return the form of the normalisation of the weights, and its axis if known; None if they do not sum to one."""
    above = list(_above(exp, _VIEWS))
    softmax = next((x for x in above if _is_call(x, {"log_softmax"})), None)
    if softmax is not None:
        return "log_softmax and exp", _axis(softmax, 1)
    for node in _above(exp, _STEPS, itself=True):
        subtracted = argument(node, 1, "other") if _is_call(node, _SUBTRACTIONS) else None
        lse = _logsumexp(subtracted, exp) if isinstance(subtracted, fx.Node) else None
        if lse is not None:
            return "exp(scores - logsumexp)", _axis(lse, 1) if lse is not subtracted else None
    divided = next((step.node for step in _sums(exp) if _is_divided_by(step.node)), None)
    if divided is None:
        return None
    return "exp and a division by its sum", _axis(divided, 2 if target_name(divided) == "normalize" else 1)


def _logsumexp(subtracted: fx.Node, exp: fx.Node) -> fx.Node | None:
    """Return the logsumexp that is subtracted, one number for each row: the call, or else a sum's logarithm or an input."""
    if _is_like(subtracted, exp):
        return None
    through = _STEPS | {"log", "log2"}
    ancestors: list[fx.Node] = [subtracted, *(_above(subtracted, through) if _is_call(subtracted, through) else ())]
    for x in ancestors:
        if _is_call(x, {"logsumexp"}):
            return x
    is_log = any(_is_call(x, {"log", "log2"}) for x in ancestors)
    is_given = all(x.op == "placeholder" or _is_call(x, _VIEWS) for x in ancestors)
    return subtracted if is_log or is_given else None


def _sums(exp: fx.Node) -> Iterator[_Step]:
    for step in _below(exp, _STEPS):
        reader = step.reader
        is_einsum = _is_call(reader, {"einsum"}) and len(_tensors(reader)) == 1
        if is_einsum or _is_call(reader, {"sum"}) or _is_divided_by_sum(reader):
            yield _Step(node=reader, reader=reader, turns=step.turns)


def _is_divided_by_sum(node: fx.Node) -> bool:
    """Return whether a node is F.normalize(x, p=1), which divides within the call."""
    return _is_call(node, {"normalize"}) and argument(node, 1, "p") == 1


def _is_divided_by(total: fx.Node) -> bool:
    if _is_divided_by_sum(total):
        return True
    for step in _below(total, _OF_SUMS):
        if _is_call(step.reader, _DIVISIONS) and argument(step.reader, 1, "other") is step.node:
            return True
        if _is_call(step.reader, {"reciprocal", "reciprocal_"}):
            return True
        if _is_call(step.reader, {"pow", "__pow__"}) and argument(step.reader, 1, "exponent") == -1:
            return True
    return False


# ---- axes -----------------------------------------------------------------------------------------------------------


def _axis(node: fx.Node, position: int) -> int | None:
    """Return the one axis that a call works along, counted from the last; None if unknown."""
    dim = argument(node, position, "dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    source = next(iter(node.all_input_nodes), None)
    rank = _rank(source)
    if not isinstance(dim, int) or isinstance(dim, bool) or rank is None:
        return None
    return dim if dim < 0 else dim - rank


def _sums_over(step: _Step, axis: int | None) -> bool:
    """Return whether a product sums over that axis of the weights. True if unknown."""
    if axis is None or step.turns is None:
        return True
    contracted = _contracted(step)
    if contracted is None:
        return True
    turned = {-1: -2, -2: -1}.get(axis, axis) if step.turns % 2 else axis
    return contracted == turned


def _contracted(step: _Step) -> int | None:
    """Return the axis of its operand that a product sums over, counted from the last."""
    node = step.reader
    if target_name(node) == "einsum":
        return _contracted_by_name(node, step.node)
    operands = _tensors(node)[1:] if target_name(node) == "baddbmm" else _tensors(node)
    return -1 if operands and operands[0] is step.node else -2


def _contracted_by_name(node: fx.Node, operand: fx.Node) -> int | None:
    equation = node.args[0]
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return None
    given, out = equation.replace(" ", "").split("->")
    of = dict(zip(_tensors(node), given.split(","), strict=False))
    others = [letters for x, letters in of.items() if x is not operand]
    summed = [i for i, x in enumerate(of[operand]) if x not in out and any(x in other for other in others)]
    return summed[0] - len(of[operand]) if len(summed) == 1 else None


# ---- the graph ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class _Step:
    """A node on the way down, and a reader of it. turns: number of swaps of the last two axes; None if other axes moved, too."""

    node: fx.Node
    reader: fx.Node
    turns: int | None = 0


def _above(node: fx.Node, through: frozenset[str] | set[str], *, itself: bool = False) -> Iterator[fx.Node]:
    """Yield the inputs of a node, nearest first, through these steps only. The node that ends a path is included."""
    waiting, seen = [(node, 0)], {node}
    if itself:
        yield node
    while waiting:
        at, far = waiting.pop(0)
        for x in at.all_input_nodes:
            if x not in seen and far < _FARTHEST:
                seen.add(x)
                yield x
                if _is_call(x, through):
                    waiting.append((x, far + 1))


def _below(node: fx.Node, through: frozenset[str]) -> Iterator[_Step]:
    """Yield the readers of a node, nearest first, in the same way."""
    waiting: list[tuple[fx.Node, int | None, int]] = [(node, 0, 0)]
    seen = {node}
    while waiting:
        at, turns, far = waiting.pop(0)
        for reader in at.users:
            yield _Step(node=at, reader=reader, turns=turns)
            if reader not in seen and far < _FARTHEST and _is_call(reader, through):
                seen.add(reader)
                waiting.append((reader, _turned(reader, turns), far + 1))


def _turned(reader: fx.Node, turns: int | None) -> int | None:
    name = str(reader.args[1]) if target_name(reader) == "getattr" else target_name(reader)
    if turns is None or name in _MOVES:
        return None
    if name not in _TURNS:
        return turns
    moved = [x if x < 0 else x - (_rank(reader) or 0) for x in reader.args[1:] if isinstance(x, int)]
    return turns + 1 if name in ("mT", "t") or sorted(moved) == [-2, -1] else None


def _is_call(node: fx.Node, names: frozenset[str] | set[str]) -> bool:
    return node.op in ("call_function", "call_method") and target_name(node) in names


def is_product(node: fx.Node) -> bool:
    """Return whether a node is the product of two computed tensors: neither is a parameter."""
    operands = _tensors(node) if _is_call(node, _PRODUCTS) else []
    operands = operands[1:] if target_name(node) == "baddbmm" else operands
    return len(operands) > 1 and not any(map(_is_weight, operands))


def _is_weight(node: fx.Node) -> bool:
    """Return whether a node is a parameter, possibly cast, transposed or scaled by a number."""
    while _is_call(node, _VIEWS | {"normalize", "mul", "truediv", "div"}) and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return isinstance(node.meta.get("example_value"), torch.nn.Parameter)


def _tensors(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    take: Callable[[fx.Node], None] = lambda x: found.append(x)  # noqa: E731
    fx.map_arg((node.args, node.kwargs), take)
    return [x for x in found if isinstance(x.meta.get("example_value"), torch.Tensor)]


def _is_like(node: fx.Node, other: fx.Node) -> bool:
    """Return whether two nodes have the same number of elements."""
    one, two = (x.meta.get("example_value") for x in (node, other))
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return False
    return bool(math.prod(axes.shape_exprs(one)) == math.prod(axes.shape_exprs(two)))


def _is_one_wider(node: fx.Node, other: fx.Node) -> bool:
    """Return whether a tensor has one element more along its last axis than another one."""
    one, two = (x.meta.get("example_value") for x in (node, other))
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor) or not one.dim():
        return False
    *first, last = axes.shape_exprs(two)
    return list(axes.shape_exprs(one)) == [*first, last + 1]


def _rank(node: fx.Node | None) -> int | None:
    value = None if node is None else node.meta.get("example_value")
    return value.dim() if isinstance(value, torch.Tensor) else None
