"""The place of the sequence in a value, or the reason why there is none; and the questions that rules ask of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import fx

from attn_compiler.passes.graph import axes, axis_rules
from attn_compiler.passes.graph.axes import Atom, AxisError, Dim, Dims
from attn_compiler.passes.graph.axis_rules import Mixed
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason


class CannotShard(Exception):
    """A graph that can't run on parts. Internal: becomes ContextParallelUnsupported. at: the mirror node that it is about."""

    def __init__(self, rule: str, observed: str, *, at: fx.Node | None = None, remedy: str | None = None) -> None:
        super().__init__(rule)
        self.reason = Reason(code=Code.CONTEXT_PARALLEL_UNSUPPORTED, rule=rule, observed=observed, remedy=remedy)
        self.at = at


#: the remedy where a model counts positions itself
GIVE_POSITIONS = (
    "pass position_ids (ContextParallel.shard gives them), so that the model does not count positions itself"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Place:
    """The place of the sequence in a value.

    dims: the axes; those of positions hold the sequence's atoms. several: for an op with several results, of each.
    is_uniform: all elements are one number, which is the same on each rank. is_share: a sum over the rank's own positions, which is a
    share of the sum over all. is_counted: it does not hold the sequence, and was made of the rank's number of positions. is_repeated:
    that number only tells how often the same numbers are repeated.
    """

    dims: Dims
    several: tuple[Dims, ...] | None = None
    is_uniform: bool = False
    is_share: bool = False
    is_counted: bool = False
    is_repeated: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Mixes:
    """The reason why a value has no place. at: the op that mixes positions. op: its name, if the node's target is none."""

    at: fx.Node
    why: str
    remedy: str | None = None
    op: str | None = None


class Places(Protocol):
    """The places known so far in a graph. places: of each mirror node that is a tensor. ranks: those that share the sequence."""

    mirror: Mirror
    ranks: frozenset[int]
    places: dict[fx.Node, Place | Mixes]

    @property
    def atoms(self) -> frozenset[Atom]:
        """Return the sequences, by their lengths."""
        ...

    def holds(self, node: fx.Node) -> bool: ...

    def is_counted(self, node: fx.Node) -> bool: ...

    def inside(self, mirror: Mirror, known: Mapping[fx.Node, Place]) -> Places:
        """Follow one call, traced by itself. known: the places of its inputs."""
        ...


def place_of(context: Places, node: fx.Node) -> Place:
    found = context.places[node]
    if isinstance(found, Mixes):
        raise AxisError(found.why)
    return found


@dataclass(frozen=True)
class Sequences:
    """Positions that ranks share, for the table of all ops."""

    context: Places

    words = "the sequence"

    @property
    def atoms(self) -> frozenset[Atom]:
        return self.context.atoms

    def axes_of(self, node: fx.Node) -> Place:
        return place_of(self.context, node)

    def cannot_meet(self, operands: Sequence[tuple[fx.Node, Dim]], *, whole: bool) -> Mixed | None:
        """Refuse numbers for positions that are not those of the sequence, unless all numbers are the same."""
        first = next(dim for _, dim in operands if axis_rules.has(self, dim))
        for x, dim in operands:
            place = place_of(self.context, x)
            if not whole and (place.is_uniform or place.is_repeated):
                continue
            if not axis_rules.has(self, dim):
                why = f"{x.name} has numbers for positions that are not those of the sequence"
                return Mixed(why=why, remedy=GIVE_POSITIONS)
            if not alike(self.atoms, dim, first):
                return Mixed(why="operands meet that hold the sequence in two ways")
        return None


def has(context: Places, dim: Dim) -> bool:
    return axis_rules.has(Sequences(context), dim)


def alike(atoms: frozenset[Atom], a: Dim, b: Dim) -> bool:
    """Return whether two dimensions hold the same sequence at the same place among axes of the same sizes."""
    long = [[x for x in axes.resolve(dim) if x.size != axes.ONE] for dim in (a, b)]
    if len(long[0]) != len(long[1]):
        return False
    pairs = zip(*long, strict=True)
    return all(x is y if x in atoms or y in atoms else axes.same_size(x.size, y.size) for x, y in pairs)
