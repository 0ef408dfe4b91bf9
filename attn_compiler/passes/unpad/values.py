"""What is known of each value of the mirror: which axes hold positions, and in which forms the value can be had."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import fx

from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.axes import Atom, Dims
from attn_compiler.passes.unpad.refusing import KeepsPadding


class Kind(enum.Enum):
    """How the rewritten graph has a value of the model's.

    ORIGINAL: from the model's own node. PACKED: for real tokens alone. RETURNED: computed packed, then padded to the model's own shape.
    LOST: not at all.
    """

    ORIGINAL = "original"
    PACKED = "packed"
    RETURNED = "returned"
    LOST = "lost"


@dataclass(frozen=True, kw_only=True, slots=True)
class Indexed:
    """A value as the model has it, taken at the real tokens. batch, seq: its axes of rows and positions once it has `rank` axes; new axes
    come first. Where both are one axis, that holds the positions of all rows."""

    batch: int
    seq: int
    rank: int


#: "plain": as the model has it. "packed": the rows' axis has size 1, that of positions one element for each real token. "unpacked": as
#: the model has it, and 0 at padding.
Form = Literal["plain", "packed", "unpacked"] | Indexed


class Need(NamedTuple):
    """A value in a form."""

    node: fx.Node
    form: Form


@dataclass(frozen=True, kw_only=True)
class FormRecipe:
    """How a form is made: `make` gets the Maker (making.py), and the nodes of what it needs, in order."""

    needs: tuple[Need, ...]
    make: Callable[[Any, tuple[fx.Node, ...]], fx.Node]


@dataclass(kw_only=True, eq=False)
class Value:
    """What is known of a mirror node.

    kind: see there.
    dims: its axes; those of rows and positions hold the analysis' own atoms.
    packed: how it is made for real tokens alone; None if it can't be.
    returned: of a RETURNED value, how it is made.
    at_padding: the number that it holds at padding; None if that is not known.
    several: of an op with several results, the axes of each.
    lost: of a LOST value, why.
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
        """Whether the model's own value is there."""
        return self.kind in (Kind.ORIGINAL, Kind.RETURNED)


def places(dims: Dims, atom: Atom) -> list[int]:
    """The axes that hold an atom."""
    return [i for i, dim in enumerate(dims) if atom in axes.resolve(dim)]
