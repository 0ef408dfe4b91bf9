"""Values of the mirror: the axes that hold positions, and the forms in which each value can be had."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import fx

from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.axes import Atom, Dims
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
    returned: for a RETURNED value, its recipe.
    at_padding: the number that it holds at padding; None if that is not known.
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


def places(dims: Dims, atom: Atom) -> list[int]:
    """Return the axes that hold an atom."""
    return [i for i, dim in enumerate(dims) if atom in axes.resolve(dim)]
