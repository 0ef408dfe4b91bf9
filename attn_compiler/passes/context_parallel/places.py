"""Where a value holds the sequence, or why it has no such place; and what rules ask of that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.axes import AxisError, Dim, Dims

if TYPE_CHECKING:
    from attn_compiler.passes.context_parallel.following import Following


#: what to do where a model counts positions itself
GIVE_POSITIONS = (
    "pass position_ids (ContextParallel.shard gives them), so that the model does not count positions itself"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Place:
    """dims: the axes of a value; those of positions hold the sequence's atoms. several: of an op with several results, of each.
    is_uniform: all elements are one number, so that each rank has the same of it. is_share: a sum over the rank's own positions, which is a
    share of the sum over all. is_counted: it does not hold the sequence, and was made of how many positions the rank has.
    is_repeated: that only says how often it has the same numbers."""

    dims: Dims
    several: tuple[Dims, ...] | None = None
    is_uniform: bool = False
    is_share: bool = False
    is_counted: bool = False
    is_repeated: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Mixes:
    """Why a value has no place. at: the op that mixes positions. op: its name, if the node's target is none."""

    at: fx.Node
    why: str
    remedy: str | None = None
    op: str | None = None


Rule = Callable[["Following", fx.Node], "Place | Mixes"]


def place_of(context: Following, node: fx.Node) -> Place:
    found = context.places[node]
    if isinstance(found, Mixes):
        raise AxisError(found.why)
    return found


def has(context: Following, dim: Dim) -> bool:
    return any(atom in context.atoms for atom in axes.resolve(dim))


def alike(context: Following, a: Dim, b: Dim) -> bool:
    """Whether two dimensions hold the same sequence at the same place among axes of the same sizes."""
    long = [[x for x in dim if x.size != axes.ONE] for dim in (a, b)]
    if len(long[0]) != len(long[1]):
        return False
    pairs = zip(*long, strict=True)
    return all(x is y if x in context.atoms or y in context.atoms else axes.same_size(x.size, y.size) for x, y in pairs)
