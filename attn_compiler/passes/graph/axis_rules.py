"""The effect of each op on axes that are followed through a graph: positions that ranks share, or rows and positions that hold padding.

RULES has a line for each op. Two rooms read it: passes/unpad removes padding, and passes/context_parallel gives each rank a part of the
sequence. Pointwise ops are known by PyTorch's tag, views by views.py. A rule says nothing of what a tensor means.

passes/spelling/dtensor_rules.py does not read it. That file sees Dynamo's calls, whose results PyTorch has placed already, and asks whether
they belong to an attention. There a product may not be cut along its rows, which these rules follow.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from attn_compiler.passes.graph import axes, views
from attn_compiler.passes.graph.axes import Atom, Dim, Dims

aten = torch.ops.aten


class HasAxes(Protocol):
    """Axes of a value. dims: of its dimensions. several: the dims of each result, for an op with several results."""

    @property
    def dims(self) -> Dims: ...

    @property
    def several(self) -> tuple[Dims, ...] | None: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Axes:
    """Axes of a result, as in HasAxes."""

    dims: Dims
    several: tuple[Dims, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """The reason why an op does not work on each position by itself. remedy: a change that helps, if there is one."""

    why: str
    remedy: str | None = None


class Followed(Protocol):
    """The axes that a rule asks about. words: their name in messages."""

    @property
    def words(self) -> str: ...

    @property
    def atoms(self) -> frozenset[Atom]:
        """Return the atoms that are followed."""
        ...

    def axes_of(self, node: fx.Node) -> HasAxes: ...

    def cannot_meet(self, operands: Sequence[tuple[fx.Node, Dim]], *, whole: bool) -> Mixed | None:
        """Return why operands may not meet along one followed axis of a result; None if they may.

        operands: those with more than one element there. whole: all have an element for each position there, whatever they hold.
        """
        ...


Rule = Callable[[Followed, fx.Node], Axes | Mixed]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of RULES. packs: without padding, the op is known to compute the same on real tokens."""

    rule: Rule
    packs: bool = True


def line_of(node: fx.Node) -> Line | None:
    """Return the line of an op; None if nothing is known of it."""
    found = RULES.get(node.target)
    if found is not None:
        return found
    if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags:
        return Line(rule=pointwise, packs=not node.target._schema.is_mutable)
    return Line(rule=view, packs=False) if views.is_view(node) else None


def has(context: Followed, dim: Dim) -> bool:
    """Return whether a dimension holds a followed atom."""
    return any(atom in context.atoms for atom in axes.resolve(dim))


def holds(context: Followed, node: fx.Node) -> bool:
    """Return whether a value has a dimension with a followed atom."""
    return any(has(context, dim) for dim in context.axes_of(node).dims)


def _met(context: Followed, found: Sequence[tuple[fx.Node, Dim]], *, whole: bool) -> Dim | Mixed:
    """Return the axis of a result at which these axes of the operands meet."""
    long = [(x, axes.resolve(dim)) for x, dim in found if not axes.is_unit(dim)]
    tracked = [dim for _, dim in long if has(context, dim)]
    if not tracked:
        return long[0][1] if long else ()
    return context.cannot_meet(long, whole=whole) or tracked[0]


def _broadcast(
    context: Followed, operands: Sequence[tuple[fx.Node, Dims]], rank: int, *, whole: bool = False
) -> Dims | Mixed:
    result: list[Dim] = []
    for at in range(rank):
        found = [(x, dims[at - rank + len(dims)]) for x, dims in operands if at - rank + len(dims) >= 0]
        dim = _met(context, found, whole=whole)
        if isinstance(dim, Mixed):
            return dim
        result.append(dim)
    return tuple(result)


# ---- the rules -----------------------------------------------------------------------------------------------------------


def pointwise(context: Followed, node: fx.Node) -> Axes | Mixed:
    operands = [
        (x, context.axes_of(x).dims) for x in node.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor)
    ]
    dims = _broadcast(context, operands, views.value(node).dim())
    if isinstance(dims, Mixed):
        return dims
    held = [atom for dim in dims for atom in axes.resolve(dim) if atom in context.atoms]
    if len(held) != len(set(held)):
        return Mixed(why=f"it pairs {context.words} with each other")
    return Axes(dims=dims)


def same(context: Followed, node: fx.Node) -> Axes | Mixed:
    return Axes(dims=context.axes_of(views.source(node)).dims)


def view(context: Followed, node: fx.Node) -> Axes | Mixed:
    """Follow axes through any op that views.py knows."""
    found = views.forward_whole(node, context.axes_of(views.source(node)).dims, context.atoms)
    return Mixed(why=f"it splits {context.words}") if found is None else Axes(dims=found)


def slice_(context: Followed, node: fx.Node) -> Axes | Mixed:
    whole = axes.shape_exprs(views.value(views.source(node))) == axes.shape_exprs(views.value(node))
    return same(context, node) if whole else along_dim(context, node)


def along_dim(context: Followed, node: fx.Node) -> Axes | Mixed:
    """Follow axes through an op along axes that it names: none of those may be followed."""
    dims = context.axes_of(views.source(node)).dims
    rank = len(dims)
    which = views.named_axes(node, rank, "dims" if node.target is aten.flip.default else "dim")
    if any(has(context, dims[i]) for i in which):
        return Mixed(why=f"it works along {context.words}")
    result: Any = node.meta["val"]
    if isinstance(result, (tuple, list)):
        return Axes(dims=dims, several=tuple(views.axes_after(dims, y, which, rank) for y in result))
    return Axes(dims=views.axes_after(dims, result, which, rank))


def getitem(context: Followed, node: fx.Node) -> Axes | Mixed:
    x, at = node.args
    several = context.axes_of(x).several if isinstance(x, fx.Node) else None
    if several is None or not isinstance(at, int):
        return Mixed(why="it takes no result of several")
    return Axes(dims=several[at])


def linear(context: Followed, node: fx.Node) -> Axes | Mixed:
    x = views.source(node)
    dims = context.axes_of(x).dims
    if has(context, dims[-1]):
        return Mixed(why=f"it sums over {context.words}")
    if any(holds(context, y) for y in node.all_input_nodes if y is not x):
        return Mixed(why=f"its weight holds {context.words}")
    return Axes(dims=(*dims[:-1], *axes.fresh(axes.shape_exprs(views.value(node))[-1:])))


def product(left: int, right: int) -> Rule:
    """Return the rule of a matrix product of two arguments; further arguments are added to it."""

    def rule(context: Followed, node: fx.Node) -> Axes | Mixed:
        a, b = node.args[left], node.args[right]
        if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
            return Mixed(why="it is no product of two tensors")
        x, y = context.axes_of(a).dims, context.axes_of(b).dims
        if has(context, x[-1]) or has(context, y[-2 if len(y) > 1 else -1]):
            return Mixed(why=f"it sums over {context.words}")
        if len(x) < 2 or len(y) < 2:
            return Axes(dims=x[:-1] if len(y) == 1 else (*y[:-2], y[-1]))
        rows, columns = x[-2], y[-1]
        if has(context, rows) and has(context, columns):
            return Mixed(why=f"it pairs {context.words} with each other, and is no attention that was recognised")
        batch = _broadcast(context, [(a, x[:-2]), (b, y[:-2])], max(len(x), len(y)) - 2, whole=True)
        if isinstance(batch, Mixed):
            return batch
        if any(holds(context, z) for z in node.all_input_nodes if z not in (a, b)):
            return Mixed(why=f"what is added holds {context.words}")
        return Axes(dims=(*batch, rows, columns))

    return rule


def normalised(context: Followed, node: fx.Node) -> Axes | Mixed:
    dims = context.axes_of(views.source(node)).dims
    shape: Any = views.argument(node, "normalized_shape")
    if any(has(context, dim) for dim in dims[len(dims) - len(shape) :]):
        return Mixed(why=f"it works along {context.words}")
    return Axes(dims=dims)


def embedding(context: Followed, node: fx.Node) -> Axes | Mixed:
    table, ids = node.args[0], node.args[1]
    if not isinstance(table, fx.Node) or not isinstance(ids, fx.Node) or holds(context, table):
        return Mixed(why=f"its table holds {context.words}")
    last = axes.fresh(axes.shape_exprs(views.value(node))[-1:])
    return Axes(dims=(*context.axes_of(ids).dims, *last))


def joined(context: Followed, node: fx.Node) -> Axes | Mixed:
    """Follow axes through cat and stack, which join tensors of the same positions."""
    parts: Any = node.args[0]
    rank = views.value(node).dim()
    at = int(views.argument(node, "dim", 0) or 0) % rank  # type: ignore[call-overload]
    is_new = node.target is aten.stack.default
    operands: list[tuple[fx.Node, Dims]] = []
    for part in parts:
        dims = context.axes_of(part).dims
        if not is_new and (len(dims) != rank or has(context, dims[at])):
            return Mixed(why=f"it joins tensors along {context.words}", remedy="call the model with use_cache=False")
        operands.append((part, dims if is_new else (*dims[:at], *dims[at + 1 :])))
    result = _broadcast(context, operands, rank - 1, whole=True)
    if isinstance(result, Mixed):
        return result
    own = axes.fresh(axes.shape_exprs(views.value(node)))[at]
    return Axes(dims=(*result[:at], own, *result[at:]))


def losses(context: Followed, node: fx.Node) -> Axes | Mixed:
    """Follow axes through the losses of each position, before their sum."""
    logits, labels = node.args[0], node.args[1]
    if not isinstance(logits, fx.Node) or not isinstance(labels, fx.Node):
        return Mixed(why="it reads no tensors")
    classes, of_labels = context.axes_of(logits).dims, context.axes_of(labels).dims
    if len(classes) != 2 or has(context, classes[1]):
        return Mixed(why="classes are not the second of two axes")
    met = _met(context, [(logits, classes[0]), (labels, of_labels[0])], whole=True)
    if isinstance(met, Mixed):
        return Mixed(why="its labels are not those of the positions of its logits")
    if any(holds(context, x) for x in node.all_input_nodes if x not in (logits, labels)):
        return Mixed(why=f"its weights hold {context.words}")
    return Axes(dims=classes[:1])


# ---- tables that are read by the numbers of a tensor, and einsum ---------------------------------------------------------


def bucketized(context: Followed, node: fx.Node) -> Axes | Mixed:
    x, bounds = node.args[:2]
    if not isinstance(x, fx.Node) or not isinstance(bounds, fx.Node) or holds(context, bounds):
        return Mixed(why=f"its boundaries hold {context.words}")
    return same(context, node)


def looked_up(context: Followed, node: fx.Node) -> Axes | Mixed:
    """Follow axes through table[ids], with one tensor of indices."""
    table, indices = node.args[0], node.args[1]
    given = [(i, x) for i, x in enumerate(indices) if x is not None] if isinstance(indices, (list, tuple)) else []
    if not isinstance(table, fx.Node) or len(given) != 1 or not isinstance(given[0][1], fx.Node):
        return Mixed(why="it reads by several indices")
    at, ids = given[0]
    if views.value(ids).dtype in (torch.bool, torch.uint8):
        return Mixed(why="it reads where a mask is true")
    return _read(context, table, at, ids)


def selected(context: Followed, node: fx.Node) -> Axes | Mixed:
    """Follow axes through table.index_select(dim, ids)."""
    table, at, ids = node.args
    if not isinstance(table, fx.Node) or not isinstance(ids, fx.Node) or not isinstance(at, int):
        return Mixed(why="it reads no table")
    return _read(context, table, at % len(context.axes_of(table).dims), ids)


def _read(context: Followed, table: fx.Node, at: int, ids: fx.Node) -> Axes | Mixed:
    """Put the axes of ids in place of one axis of the table, which may not be followed."""
    dims = context.axes_of(table).dims
    if has(context, dims[at]) or (holds(context, table) and holds(context, ids)):
        return Mixed(why=f"it reads some positions of {context.words}")
    return Axes(dims=(*dims[:at], *context.axes_of(ids).dims, *dims[at + 1 :]))


def gathered(context: Followed, node: fx.Node) -> Axes | Mixed:
    """Follow axes through table.gather(dim, ids): along the other axes, ids pair with the table's elements."""
    table, at, ids = node.args[:3]
    if not isinstance(table, fx.Node) or not isinstance(ids, fx.Node) or not isinstance(at, int):
        return Mixed(why="it reads no table")
    dims = context.axes_of(ids).dims
    others = [dim for i, dim in enumerate(dims) if i != at % len(dims)]
    if holds(context, table) or any(has(context, dim) for dim in others):
        return Mixed(why=f"it reads some positions of {context.words}")
    return Axes(dims=dims)


def einsum(context: Followed, node: fx.Node) -> Axes | Mixed:
    """Follow axes through einsum: a followed letter stands in the result, and has the same axis in each operand."""
    equation, operands = node.args[0], node.args[1]
    if not isinstance(equation, str) or not isinstance(operands, (list, tuple)) or "." in equation:
        return Mixed(why="its equation is not read")
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or len(terms) != len(operands) or any(len(set(term)) != len(term) for term in (*terms, result)):
        return Mixed(why="its equation is not read")
    by_letter: dict[str, list[tuple[fx.Node, Dim]]] = {}
    for term, x in zip(terms, operands, strict=True):
        for letter, dim in zip(term, context.axes_of(x).dims, strict=True):
            by_letter.setdefault(letter, []).append((x, dim))
    known: dict[str, Dim] = {}
    for letter, found in by_letter.items():
        met = _met(context, found, whole=True)
        if isinstance(met, Mixed):
            return met
        known[letter] = met
    held = [letter for letter, dim in known.items() if has(context, dim)]
    if any(letter not in result for letter in held):
        return Mixed(why=f"it sums over {context.words}")
    atoms = [atom for letter in held for atom in axes.resolve(known[letter]) if atom in context.atoms]
    if len(atoms) != len(set(atoms)):
        return Mixed(why=f"it pairs {context.words} with each other, and is no attention that was recognised")
    fresh = axes.fresh(axes.shape_exprs(views.value(node)))
    return Axes(dims=tuple(known[letter] if letter in held else dim for letter, dim in zip(result, fresh, strict=True)))


# ---- the table -----------------------------------------------------------------------------------------------------------


def _lines(rule: Rule, *targets: object, packs: bool = True) -> dict[object, Line]:
    return dict.fromkeys(targets, Line(rule=rule, packs=packs))


RULES: dict[object, Line] = {
    **_lines(view, *views.PERMUTES, *views.RESHAPES, *views.SQUEEZES, *views.EXPANDS),
    **_lines(view, aten.unsqueeze.default, aten.repeat_interleave.self_int),
    **_lines(same, *views.CASTS, *views.COPIES, aten.to.device, aten.type_as.default, aten.dropout.default),
    **_lines(same, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    **_lines(along_dim, aten.softmax.int, aten.log_softmax.int, aten.sum.dim_IntList, aten.mean.dim),
    **_lines(along_dim, aten.amax.default, aten.amin.default, aten.argmax.default, aten.select.int),
    **_lines(along_dim, aten.split.Tensor, aten.chunk.default, aten.split_with_sizes.default, aten.unbind.int),
    **_lines(along_dim, aten.glu.default, aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim),
    **_lines(along_dim, aten.var.correction, aten.std.correction, aten.var.dim, aten.std.dim, aten.cumsum.default),
    **_lines(along_dim, aten.topk.default, aten.sort.default, aten.narrow.default, aten.flip.default, packs=False),
    **_lines(along_dim, aten.max.dim, aten.min.dim, aten.var_mean.correction, aten.var_mean.dim, packs=False),
    **_lines(slice_, aten.slice.Tensor),
    **_lines(embedding, aten.embedding.default),
    **_lines(linear, aten.linear.default, aten._weight_int8pack_mm.default),
    **_lines(product(0, 1), aten.matmul.default, aten.mm.default, aten._int_mm.default),
    **_lines(product(0, 1), aten.bmm.default, packs=False),
    **_lines(product(1, 2), aten.addmm.default),
    **_lines(product(1, 2), aten.baddbmm.default, packs=False),
    **_lines(normalised, aten.layer_norm.default, aten.rms_norm.default),
    **_lines(joined, aten.cat.default, aten.concatenate.default, aten.concat.default, aten.stack.default),
    **_lines(losses, aten.cross_entropy_loss.default),
    **_lines(getitem, operator.getitem),
    **_lines(pointwise, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar),
    **_lines(pointwise, aten.floor_divide.default, packs=False),
    **_lines(pointwise, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor, packs=False),
    **_lines(pointwise, aten.fill_.Scalar, aten.copy_.default, packs=False),
    **_lines(bucketized, aten.bucketize.Tensor, packs=False),
    **_lines(looked_up, aten.index.Tensor, packs=False),
    **_lines(selected, aten.index_select.default, packs=False),
    **_lines(gathered, aten.gather.default, packs=False),
    **_lines(einsum, aten.einsum.default, packs=False),
}
