"""Comparison of the rank's program with that of the whole sequence.

The frame is traced once more, with inputs as long as one process would be given, and has to make the same graph. Only sizes of axes that
hold the sequence, or that count it, may differ.

So a number that Python made of the rank's own length is found wherever it is used, however it was computed, and a number that only looks
like the length is not. A tensor that has another shape there, and does not hold the sequence, was made of the length (following.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.context_parallel import ContextParallel
from attn_compiler.passes.context_parallel import wrapped
from attn_compiler.passes.context_parallel.following import Input, tensor_of
from attn_compiler.passes.context_parallel.places import CannotShard
from attn_compiler.passes.graph import mirroring
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.passes.graph.mirror import Mirror, opaque
from attn_compiler.passes.graph.unit import Unit, UnitPlace, examples
from attn_compiler.passes.spelling import checkpoints, plain_calls
from attn_compiler.reasons.errors import described
from attn_compiler.torch_private import frames as torch_frames, symbols as torch_symbols, tracing as torch_tracing

aten = torch.ops.aten

RULE = "a number that is made of the sequence's length is the same on a part of it"
REMEDY = (
    "give the model that number, or a tensor of it, as an input that every rank has as a whole: ContextParallel(replicated=...); if it is "
    "right for a part of the sequence, give ContextParallel(..., allow=('length',))"
)

#: op -> names of arguments that are sizes, which may be multiples of the length
_SIZES: Mapping[object, frozenset[str]] = {
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.expand.default), frozenset({"size"})),
    **dict.fromkeys((aten.broadcast_to.default, aten.new_zeros.default, aten.new_ones.default), frozenset({"size"})),
    **dict.fromkeys((aten.new_empty.default, aten.new_full.default, aten.full.default), frozenset({"size"})),
    **dict.fromkeys((aten.zeros.default, aten.ones.default, aten.empty.memory_format), frozenset({"size"})),
    **dict.fromkeys((aten.rand.default, aten.randn.default), frozenset({"size"})),
    aten.reshape.default: frozenset({"shape"}),
    aten.unflatten.int: frozenset({"sizes"}),
    aten.repeat.default: frozenset({"repeats"}),
    aten.eye.default: frozenset({"n"}),
    aten.eye.m: frozenset({"n", "m"}),
    **dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step), frozenset({"end"})),
    aten.slice.Tensor: frozenset({"end"}),
    aten.narrow.default: frozenset({"length"}),
    aten.split.Tensor: frozenset({"split_size"}),
    aten.split_with_sizes.default: frozenset({"split_sizes"}),
}
#: names of Dynamo's calls of DTensors that have sizes among their arguments
_SIZED = wrapped.DOORS | {"view", "reshape", "expand", "unflatten", "new_zeros", "new_ones", "new_empty"}
#: ops whose start has to be 0 where a size differs: a range that begins elsewhere counts from the end
_FROM_START = (aten.arange.start, aten.arange.start_step, aten.slice.Tensor, aten.narrow.default)


@dataclass(frozen=True, kw_only=True, eq=False)
class ComparedLengths:
    """The two programs. mirror: of the rank. whole: of the whole sequence. wholes: node of the rank's -> the one of the whole."""

    mirror: Mirror
    whole: Mirror
    wholes: Mapping[fx.Node, fx.Node]

    def differing_axes(self, node: fx.Node) -> frozenset[int]:
        """Return the axes of a value that are of another size for the whole sequence."""
        own, whole = tensor_of(self.mirror, node), tensor_of(self.whole, self.wholes[node])
        if not isinstance(own, torch.Tensor) or not isinstance(whole, torch.Tensor):
            return frozenset()
        return frozenset(
            i for i, (a, b) in enumerate(zip(own.shape, whole.shape, strict=True)) if _plain(a) != _plain(b)
        )


class NotComparable(Exception):
    """The reason why the whole sequence's program is not known. Internal."""


def compare(unit: Unit, mirror: Mirror, cp: ContextParallel, given: Mapping[fx.Node, Input]) -> ComparedLengths:
    """Raise CannotShard where the programs differ in more than sizes, NotComparable where there is only the rank's own."""
    whole = _whole_mirror(unit, cp, given)
    own_nodes, whole_nodes = _nodes(mirror), _nodes(whole)
    wholes: dict[fx.Node, fx.Node] = {}
    for own, other in zip(own_nodes, whole_nodes, strict=False):
        if own.op != other.op or (own.op == "call_function" and own.target != other.target):
            raise _other_program(own, other)
        wholes[own] = other
        _check_numbers(own, other, cp.size, wholes)
        if own.target is opaque:
            _check_closed(mirror.owner(own), whole.owner(other), own, cp.size)
        _check_ranks(own, other)
    if len(own_nodes) != len(whole_nodes):
        longer = own_nodes if len(own_nodes) > len(whole_nodes) else whole_nodes
        at = longer[min(len(own_nodes), len(whole_nodes))]
        raise _other_program(at if longer is own_nodes else own_nodes[-1], at)
    return ComparedLengths(mirror=mirror, whole=whole, wholes=wholes)


def _whole_mirror(unit: Unit, cp: ContextParallel, given: Mapping[fx.Node, Input]) -> Mirror:
    tensors: dict[torch.Tensor, torch.Tensor] = {}
    for one in given.values():
        real = torch_frames.given_tensor(one.node)
        if real is None:
            raise NotComparable(f"{one.node.name} is no tensor that the function is given")
        tensors[real] = _longer(real, one.axis, cp.size)
    try:
        gm = torch_frames.captured_with(tensors)
    except torch_frames.NotCaptured as error:
        raise NotComparable(str(error)) from error
    checkpoints.inline(gm)
    mode = torch_tracing.fake_mode_of_values(examples(gm))
    if mode is None:
        raise NotComparable("it takes no tensors")
    other = Unit.of(gm, unit.options, UnitPlace(name=unit.name, mode=mode))
    try:
        with torch_tracing.tracing_in(mode):
            other.spelling = plain_calls.spell_out(other)
            return mirroring.trace_mirror(other)
    except Exception as error:
        raise NotComparable(described(error)) from error


def _longer(x: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Return an unfilled tensor with the layout of x, and `size` times the positions."""
    if type(x) is not torch.Tensor or x.layout != torch.strided:
        raise NotComparable(f"a {type(x).__name__} is given")
    shape = [n * size if i == axis else n for i, n in enumerate(x.shape)]
    # Strides of outer axes are multiples of the sequence's length.
    strides = [s * size if s > x.stride(axis) and n > 1 else s for s, n in zip(x.stride(), x.shape, strict=True)]
    try:
        with torch.no_grad():
            found = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
    except RuntimeError as error:
        raise NotComparable(f"no memory for an input of the whole sequence: {described(error)}") from error
    return found.requires_grad_(x.requires_grad)


def _nodes(mirror: Mirror) -> list[fx.Node]:
    """Return the nodes that do more than read symbolic sizes."""
    return [node for node in mirror.graph.nodes if not isinstance(node.meta.get("val"), torch.SymInt)]


def _check_ranks(own: fx.Node, other: fx.Node) -> None:
    a, b = own.meta.get("val"), other.meta.get("val")
    if isinstance(a, torch.Tensor) and (not isinstance(b, torch.Tensor) or a.dim() != b.dim() or a.dtype != b.dtype):
        raise _other_program(own, other)


def _check_numbers(own: fx.Node, other: fx.Node, size: int, wholes: Mapping[fx.Node, fx.Node]) -> None:
    """Raise CannotShard unless arguments are the same but for sizes, and constants hold the same numbers."""
    if own.op == "output":
        return
    a, b = own.meta.get("constant"), other.meta.get("constant")
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and not _holds_same(a, b):
        raise _differs(own, f"a tensor of {_shown(a)}", f"one of {_shown(b)}")
    for name, mine, theirs in _arguments(own, other):
        if isinstance(mine, fx.Node) and isinstance(theirs, fx.Node):
            if not isinstance(mine.meta.get("val"), torch.SymInt) and wholes.get(mine) is not theirs:
                raise _other_program(own, other)
            continue
        mine, theirs = _plain(mine), _plain(theirs)
        if mine == theirs and type(mine) is type(theirs):
            continue
        if not _is_number(mine) or not _is_number(theirs):
            raise _other_program(own, other)
        is_size = name in _SIZES.get(own.target, frozenset()) and mine * size == theirs
        if not is_size or (own.target in _FROM_START and _bound(own).get("start") not in (None, 0)):
            raise _differs(own, f"{name}={mine}", f"{theirs}")


def _check_closed(own: fx.Node | None, other: fx.Node | None, at: fx.Node, size: int) -> None:
    """Check calls that the mirror does not look into: of DTensors, of vmap's borders."""
    if own is None or other is None:
        return
    mine, theirs = (_leaves((node.args, node.kwargs)) for node in (own, other))
    if target_name(own) != target_name(other) or len(mine) != len(theirs):
        raise _other_program(own, other)
    for a, b in ((_plain(a), _plain(b)) for a, b in zip(mine, theirs, strict=True)):
        if _is_number(a) and a != b and not (target_name(own) in _SIZED and a * size == b):
            raise CannotShard(
                RULE, f"{target_name(own)}: {a} for the rank's part, {b} for the whole sequence", at=at, remedy=REMEDY
            )


def _arguments(own: fx.Node, other: fx.Node) -> Iterator[tuple[str, Any, Any]]:
    """Yield name and values of each argument, those in lists one by one."""
    mine, theirs = _bound(own), _bound(other)
    if mine.keys() != theirs.keys():
        raise _other_program(own, other)
    for name in mine:
        a, b = _leaves(mine[name]), _leaves(theirs[name])
        if len(a) != len(b):
            raise _other_program(own, other)
        yield from ((name, x, y) for x, y in zip(a, b, strict=True))


def _bound(node: fx.Node) -> dict[str, Any]:
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    names += [str(i) for i in range(len(names), len(node.args))]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _leaves(x: Any) -> list[Any]:
    if isinstance(x, (tuple, list)):
        return [leaf for item in x for leaf in _leaves(item)]
    if isinstance(x, dict):
        return [leaf for item in x.values() for leaf in _leaves(item)]
    return _leaves((x.start, x.stop, x.step)) if isinstance(x, slice) else [x]


def _plain(x: Any) -> Any:
    """Return a number with its value in this call."""
    value = x.meta.get("val") if isinstance(x, fx.Node) else x
    return torch_symbols.example(value)


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _holds_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b))


def _shown(x: torch.Tensor) -> str:
    return str(x.item()) if x.numel() == 1 else f"{tuple(x.shape)}"


def _differs(own: fx.Node, mine: str, theirs: str) -> CannotShard:
    return CannotShard(
        RULE, f"{own.target}: {mine} for the rank's part, {theirs} for the whole sequence", at=own, remedy=REMEDY
    )


def _other_program(own: fx.Node, other: fx.Node) -> CannotShard:
    return CannotShard(
        "the model computes the same for a part of the sequence and for all of it",
        f"{own.target or own.op} for the rank's part, {other.target or other.op} for the whole sequence",
        at=own if own.op == "call_function" else None,
        remedy="let nothing that the model does depend on how long its inputs are",
    )
