"""Values of the mirror: the axes that hold positions, the forms in which each value can be had, and the questions that rules ask."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import fx

from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.axes import Atom, Dim, Dims
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason


class KeepsPadding(Exception):
    """A graph that stays as it is. Internal: the pass turns it into a line of the report.

    reason: for the report. at: the mirror node that is to blame; None if it is no node.
    """

    def __init__(
        self, code: Code, rule: str, observed: str, *, at: fx.Node | None = None, remedy: str | None = None
    ) -> None:
        super().__init__(rule)
        self.reason = Reason(code=code, rule=rule, observed=observed, remedy=remedy)
        self.at = at


#: the rule for ops that read packed tokens
POSITION_WISE = "each op between the inputs and the outputs works on each position by itself"


class Kind(enum.Enum):
    """The source of a model's value in the rewritten graph.

    ORIGINAL: the model's own node. PACKED: for real tokens alone. RETURNED: computed packed, then padded to the model's own shape.
    LOST: there is none.
    """

    ORIGINAL = "original"
    PACKED = "packed"
    RETURNED = "returned"
    LOST = "lost"


@dataclass(frozen=True, kw_only=True, slots=True)
class Indexed:
    """The form of a plain value that is taken at the real tokens.

    batch, seq: its axes of rows and positions once it has `rank` axes; new axes come first. Where both are one axis, that holds the
    positions of all rows.
    """

    batch: int
    seq: int
    rank: int


#: "plain": the model's value. "packed": the axis of rows has size 1, the axis of positions one element for each real token. "unpacked":
#: the model's shape, with 0 at padding.
Form = Literal["plain", "packed", "unpacked"] | Indexed


class Need(NamedTuple):
    """A value in a form."""

    node: fx.Node
    form: Form


@dataclass(frozen=True, kw_only=True)
class FormRecipe:
    """The recipe of a form: `make` gets the Maker (making.py), and the nodes of `needs`, in order."""

    needs: tuple[Need, ...]
    make: Callable[[Any, tuple[fx.Node, ...]], fx.Node]


@dataclass(kw_only=True, eq=False)
class Value:
    """The analysis of a mirror node.

    kind: the source of its value.
    dims: its axes; those of rows and positions hold the analysis' own atoms.
    packed: the recipe for real tokens alone; None if there is none.
    returned: the recipe of the model's own tensor, of a RETURNED value, and of a PACKED one if it is known; None if there is none.
    at_padding: the number that it holds at padding; None if that is not known, and NaN if it depends on the sign of a zero.
    several: for an op with several results, the axes of each.
    lost: for a LOST value, the reason.
    """

    kind: Kind
    dims: Dims = ()
    packed: FormRecipe | None = None
    returned: FormRecipe | None = None
    at_padding: bool | int | float | None = None
    several: tuple[Dims, ...] | None = None
    lost: KeepsPadding | None = None

    @property
    def is_exact(self) -> bool:
        """Return whether the model's own value is there."""
        return self.kind in (Kind.ORIGINAL, Kind.RETURNED)

    @property
    def is_whole(self) -> bool:
        """Return whether an op may read the model's own value, which is made of the packed one if need be."""
        return self.is_exact or self.returned is not None


def places(dims: Dims, atom: Atom) -> list[int]:
    """Return the axes that hold an atom."""
    return [i for i, dim in enumerate(dims) if atom in axes.resolve(dim)]


class Context(Protocol):
    """The analysis as rules see it. batch, seq: the atoms of rows and of positions; one atom if there is one row."""

    mirror: Mirror
    batch: Atom
    seq: Atom

    def value(self, node: fx.Node) -> Value: ...


def tags(context: Context, dim: Dim) -> tuple[object, ...]:
    """Return a dimension as rows, positions and sizes: these have to agree where two operands meet."""
    marks: Mapping[Atom, object] = {context.batch: "rows", context.seq: "positions"}
    return tuple(marks.get(atom, atom.size) for atom in axes.resolve(dim) if atom.size != axes.ONE or atom in marks)


def is_tagged(context: Context, dim: Dim) -> bool:
    return any(atom in (context.batch, context.seq) for atom in axes.resolve(dim))


def fresh(node: fx.Node) -> Dims:
    """Return axes of which nothing is known but their sizes."""
    x = node.meta.get("val")
    return axes.fresh(axes.shape_exprs(x)) if isinstance(x, torch.Tensor) else ()


def has_both(context: Context, dims: Dims) -> bool:
    return len(places(dims, context.batch)) == 1 and len(places(dims, context.seq)) == 1


def call(node: fx.Node, forms: Mapping[fx.Node, Form]) -> FormRecipe:
    """Return the recipe of the op on its operands in these forms; operands that are not named stay plain."""
    needs = tuple(Need(x, forms.get(x, "plain")) for x in node.all_input_nodes)

    def make(maker: Any, given: tuple[fx.Node, ...]) -> fx.Node:
        of = {need.node: own for need, own in zip(needs, given, strict=True)}
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: of[n])
        made: fx.Node = maker.call(node.target, *args, **kwargs)
        return made

    return FormRecipe(needs=needs, make=make)


def refused(node: fx.Node, observed: str, remedy: str | None = None) -> KeepsPadding:
    return KeepsPadding(Code.MIXES_POSITIONS, POSITION_WISE, f"{node.target}: {observed}", at=node, remedy=remedy)


# ---- forms of operands ---------------------------------------------------------------------------------------------------


def operand_form(context: Context, node: fx.Node, x: fx.Node, dims: Dims) -> Form:
    """Return the form of an operand of an op whose result, of `dims`, is packed.

    A value that the model makes without attention may stay plain: its elements are taken at the result's tokens.
    """
    value = context.value(x)
    if not isinstance(x.meta.get("val"), torch.Tensor):
        return "plain"
    if value.packed is not None and has_both(context, value.dims):
        _require_same_order(context, node, value.dims, dims)
        return "packed"
    if not value.is_exact:
        raise refused(node, f"{x.name} can't be packed")
    (i,), (j,) = places(dims, context.batch), places(dims, context.seq)
    rank = len(dims)
    first = rank - x.meta["val"].dim()
    if max(i, j) < first:
        return "plain"
    require_alone(context, node, dims, (i, j))
    return Indexed(batch=i, seq=j, rank=rank)


def _require_same_order(context: Context, node: fx.Node, own: Dims, dims: Dims) -> None:
    """Raise KeepsPadding unless an operand's rows and positions lie at the result's axes, in one order where both are one axis."""
    for of_operand, of_result in zip(reversed(own), reversed(dims), strict=False):
        if is_tagged(context, of_operand) and tags(context, of_operand) != tags(context, of_result):
            raise refused(node, "operands meet that have rows and positions in another order")


def require_alone(context: Context, node: fx.Node, dims: Dims, at: Sequence[int]) -> None:
    for i in set(at):
        if any(atom not in (context.batch, context.seq) and atom.size != axes.ONE for atom in axes.resolve(dims[i])):
            raise refused(node, "rows or positions share an axis with something else")
    i, j = at
    both = list(dict.fromkeys((context.batch, context.seq)))
    if i == j and [a for a in axes.resolve(dims[i]) if a.size != axes.ONE] != both:
        raise refused(node, "positions come before rows in one axis")
