"""Attention whose softmax is written out: `exp(s - max) / sum`, `exp(s - logsumexp(s))`, `log_softmax(s).exp()`. It is told as a miss.

Looked for on Dynamo's own nodes, so that a graph without another attention needs no mirror. It takes all three for one: the product of two
tensors that the model computes (q kᵀ) above the exp, weights that sum to one, and a product with a third (v) that sums over the same axis.
So routers, losses, samplers and kernels of distances are none: one of the three is not there.
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
#: what leaves the elements what they are, perhaps at other places
_VIEWS = frozenset(
    "to float half bfloat16 double type type_as view reshape unsqueeze squeeze transpose permute swapaxes movedim contiguous clone "
    "expand expand_as flatten unflatten getitem getattr detach view_as chunk split t".split()
)
#: what stands between the product and the softmax, or between the softmax and the product with v
_STEPS = (
    _VIEWS
    | _DIVISIONS
    | _SUBTRACTIONS
    | frozenset(
        "add add_ iadd mul mul_ imul multiply neg neg_ masked_fill masked_fill_ where clamp clamp_ clip clamp_min clamp_max tanh dropout "
        "dropout_ nan_to_num nan_to_num_ log_softmax minimum maximum normalize".split()
    )
)
#: what a sum may pass before something is divided by it
_OF_SUMS = _STEPS | frozenset("reciprocal reciprocal_ pow __pow__".split())
_TURNS = frozenset("transpose mT swapaxes t".split())
_MOVES = frozenset("permute movedim view reshape flatten unflatten chunk split".split())
_FARTHEST = 24

_REMEDY = "write torch.softmax(scores, dim=-1), or call torch.nn.functional.scaled_dot_product_attention"


@dataclass(frozen=True, kw_only=True, eq=False)
class WrittenOut:
    """exp: the node that makes weights of scores. scores: the product q kᵀ. how: what the model writes in place of a softmax."""

    exp: fx.Node
    scores: fx.Node
    how: str

    @property
    def reason(self) -> Reason:
        return Reason(
            code=Code.WRITTEN_BY_HAND,
            rule="the softmax of an attention is one call of PyTorch's",
            observed=f"it is written out as {self.how}",
            remedy=_REMEDY,
        )


def find(graph: fx.Graph) -> list[WrittenOut]:
    """Each attention of one Dynamo graph that is written so, once, in its order."""
    found: dict[fx.Node, WrittenOut] = {}
    for node in graph.nodes:
        if _is_call(node, _EXPONENTIALS):
            one = _written(node)
            if one is not None:
                found.setdefault(one.scores, one)
    return list(found.values())


def _written(exp: fx.Node) -> WrittenOut | None:
    scores = next((x for x in _above(exp, _STEPS) if is_product(x) and _is_like(x, exp)), None)
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
    """How the weights come to sum to one, and over which axis if that is told; None if they don't."""
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
    """What of one number a row is subtracted as its logsumexp: the call, or what a sum's logarithm or an input stands for."""
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
    """Sums of the weights over an axis."""
    for step in _below(exp, _STEPS):
        reader = step.reader
        is_einsum = _is_call(reader, {"einsum"}) and len(_tensors(reader)) == 1
        if is_einsum or _is_call(reader, {"sum"}) or _is_divided_by_sum(reader):
            yield _Step(node=reader, reader=reader, turns=step.turns)


def _is_divided_by_sum(node: fx.Node) -> bool:
    """F.normalize(x, p=1): the division is within the call."""
    return _is_call(node, {"normalize"}) and argument(node, 1, "p") == 1


def _is_divided_by(total: fx.Node) -> bool:
    """Whether something is divided by a sum of weights."""
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
    """The one axis that a call works along, counted from the last; None if it is not told."""
    dim = argument(node, position, "dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    source = next(iter(node.all_input_nodes), None)
    rank = _rank(source)
    if not isinstance(dim, int) or isinstance(dim, bool) or rank is None:
        return None
    return dim if dim < 0 else dim - rank


def _sums_over(step: _Step, axis: int | None) -> bool:
    """Whether a product sums over that axis of the weights, as far as it can be told."""
    if axis is None or step.turns is None:
        return True
    contracted = _contracted(step)
    if contracted is None:
        return True
    turned = {-1: -2, -2: -1}.get(axis, axis) if step.turns % 2 else axis
    return contracted == turned


def _contracted(step: _Step) -> int | None:
    """The axis of its operand that a product sums over, counted from the last."""
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
    """A node on the way down, and one that reads it. turns: how often the last two axes changed places; None if others moved, too."""

    node: fx.Node
    reader: fx.Node
    turns: int | None = 0


def _above(node: fx.Node, through: frozenset[str] | set[str], *, itself: bool = False) -> Iterator[fx.Node]:
    """What a node is made of, nearest first, through such steps and no others; what ends the way is given, too."""
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
    """What is made of a node, nearest first, in the same way."""
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
    """Whether a node is the product of two tensors that the model computes: neither is a parameter."""
    operands = _tensors(node) if _is_call(node, _PRODUCTS) else []
    operands = operands[1:] if target_name(node) == "baddbmm" else operands
    return len(operands) > 1 and not any(map(_is_weight, operands))


def _is_weight(node: fx.Node) -> bool:
    """Whether a node is a parameter, looked at in another way: cast, turned, scaled by a number."""
    while _is_call(node, _VIEWS | {"normalize", "mul", "truediv", "div"}) and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return isinstance(node.meta.get("example_value"), torch.nn.Parameter)


def _tensors(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    take: Callable[[fx.Node], None] = lambda x: found.append(x)  # noqa: E731
    fx.map_arg((node.args, node.kwargs), take)
    return [x for x in found if isinstance(x.meta.get("example_value"), torch.Tensor)]


def _is_like(node: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes hold as many numbers."""
    one, two = (x.meta.get("example_value") for x in (node, other))
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return False
    return bool(math.prod(axes.shape_exprs(one)) == math.prod(axes.shape_exprs(two)))


def _rank(node: fx.Node | None) -> int | None:
    value = None if node is None else node.meta.get("example_value")
    return value.dim() if isinstance(value, torch.Tensor) else None
