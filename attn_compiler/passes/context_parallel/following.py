"""The axes along which each value of the mirror holds the sequence: from the inputs on, op by op. An op that mixes positions says why.

An op without a line in axis_rules.py that reads positions is taken to mix them. A tensor may have an element for each of the rank's own
positions without being made of the sequence (an arange). It may not meet one that was. Those are positions that the model counts itself,
and every rank would count from zero.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from attn_compiler.passes.context_parallel import ops, wrapped
from attn_compiler.passes.context_parallel.numbers import IF_CHANCE, LENGTH, is_of_length
from attn_compiler.passes.context_parallel.places import GIVE_POSITIONS, CannotShard, Mixes, Place
from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.axes import Atom, AxisError, Dims
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Site
from attn_compiler.torch_private import dtensors as torch_dtensors

#: Dynamo's names of the model's own inputs: parameters, buffers and attributes of modules
_STATE = re.compile(r"(^l_self_)|(_(parameters|buffers|modules)_)|(^self_)")


@dataclass(frozen=True, kw_only=True)
class Input:
    """A graph input with a part of the sequence. node: of the Dynamo graph. axis: of its positions. length: of that axis."""

    node: fx.Node
    axis: int
    length: int


def inputs(graph: fx.Graph, replicated: tuple[str, ...]) -> dict[fx.Node, Input]:
    """Return the inputs that `ContextParallel.shard` cuts: integers and booleans along their last axis, others of (B, S, ·) along S."""
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or is_state(node) or is_named(node, replicated):
            continue
        axis = _sequence_axis(value)
        if axis is None:
            continue
        length = value.shape[axis]
        if not isinstance(length, int):
            raise CannotShard(
                "sizes are known when the graph is compiled",
                f"{node.name} has {length} positions",
                remedy="compile with dynamic=False",
            )
        if length > 1:
            found[node] = Input(node=node, axis=axis, length=length)
    return found


def _sequence_axis(value: torch.Tensor) -> int | None:
    if not value.is_floating_point():
        return value.dim() - 1 if value.dim() in (1, 2, 3) else None
    return 1 if value.dim() == 3 else None


def is_state(node: fx.Node) -> bool:
    """Return whether an input is the model's own: it is the same on all ranks."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.nn.Parameter) or _STATE.search(node.name.lower()) is not None


def is_named(node: fx.Node, names: tuple[str, ...]) -> bool:
    """Return whether the user names an input."""
    return any(re.search(rf"(^|_){re.escape(name)}_?$", node.name) for name in names)


def tensor_of(mirror: Mirror, node: fx.Node) -> object:
    """Return the tensor that a node stands for. A DTensor stands for itself here; the mirror has the tensors inside."""
    dynamo = mirror.dynamo_node(node)
    value = None if dynamo is None else dynamo.meta.get("example_value")
    return value if torch_dtensors.is_dtensor(value) else node.meta.get("val")


class Following:
    """Places of the sequence. places: mirror node of a tensor -> where it holds the sequence, or why it has no place any more (Mixes).

    ranks: those that share the sequence. differing: returns the axes of a value that are of another size for the whole sequence, if known.
    """

    def __init__(
        self,
        mirror: Mirror,
        given: Mapping[fx.Node, Input],
        sites: Sequence[Site],
        allowed: tuple[str, ...],
        ranks: frozenset[int] = frozenset(),
        differing: Callable[[fx.Node], frozenset[int]] | None = None,
    ) -> None:
        self.mirror = mirror
        self.ranks = ranks
        self._allowed = allowed
        self._differing = differing
        self._given = given
        self._atoms = {length: Atom(axes.size_expr(length)) for length in {one.length for one in given.values()}}
        self._outs = {site.match.out: site for site in sites}
        self.places: dict[fx.Node, Place | Mixes] = {}
        self._follow()

    def inside(self, mirror: Mirror, known: Mapping[fx.Node, Place]) -> Following:
        """Follow one call, traced by itself. known: the places of its inputs."""
        found = copy.copy(self)
        found.mirror, found._given, found._outs, found.places = mirror, {}, {}, dict(known)
        found._differing = None
        found._follow()
        return found

    def _follow(self) -> None:
        for node in self.mirror.graph.nodes:
            if node.op != "output" and node not in self.places:
                self.places[node] = self._place(node)

    @property
    def atoms(self) -> frozenset[Atom]:
        return frozenset(self._atoms.values())

    def holds(self, node: fx.Node) -> bool:
        """Return whether a value has an element for each of the rank's positions."""
        place = self.places[node]
        return isinstance(place, Place) and any(atom in self.atoms for atom in axes.flat(place.dims))

    def holds_still(self, node: fx.Node) -> bool:
        """Return whether a value has an element for each of the rank's positions, and no op up to it mixed any."""
        return isinstance(self.places.get(node), Place) and self.holds(node)

    def is_counted(self, node: fx.Node) -> bool:
        """Return whether a value holds numbers that were made of the rank's number of positions."""
        place = self.places.get(node)
        return isinstance(place, Place) and place.is_counted and not (place.is_uniform or place.is_repeated)

    def looks_like_part(self, node: fx.Node) -> bool:
        """Return whether another graph that takes a value would wrongly see a part of the sequence in it."""
        place, value = self.places[node], self._value(node)
        if not isinstance(place, Place) or place.is_uniform or not isinstance(value, torch.Tensor) or self.holds(node):
            return False
        axis = _sequence_axis(value)
        dynamo = self.mirror.dynamo_node(node)
        if axis is None or (dynamo is not None and dynamo.op == "placeholder"):
            return False
        return axes.shape_exprs(value)[axis] in {atom.size for atom in self.atoms}

    def _value(self, node: fx.Node) -> object:
        return tensor_of(self.mirror, node)

    def _place(self, node: fx.Node) -> Place | Mixes:
        if node.op != "call_function":
            return self._leaf(node)
        site = self._outs.get(node)
        if site is not None:
            return self._counted(node, self._of_site(node, site))
        lost = next((p for x in node.all_input_nodes if isinstance(p := self.places[x], Mixes)), None)
        if lost is not None:
            return lost
        found = self._of_call(node)
        if isinstance(found, Mixes) and (wrapped.name(self.mirror, node) in self._allowed or found.op in self._allowed):
            return self._as_allowed(node)
        return (
            found
            if isinstance(found, Mixes) or LENGTH in self._allowed
            else self._counted(node, self._scaled(node, found))
        )

    def _counted(self, node: fx.Node, found: Place | Mixes) -> Place | Mixes:
        """Mark a value as made of the length if it has another size for the whole sequence, or was made of such a value.

        An axis that holds the sequence may have another size.
        """
        if isinstance(found, Mixes) or self._differing is None or not isinstance(self._value(node), torch.Tensor):
            return found
        longer = self._differing(node)
        held = {i for i, dim in enumerate(found.dims) if any(atom in self.atoms for atom in axes.resolve(dim))}
        if held and held != longer:
            op = wrapped.name(self.mirror, node)
            return Mixes(at=node, why="its axes are others for the whole sequence", remedy=GIVE_POSITIONS, op=op)
        given = [place for x in node.all_input_nodes if isinstance(place := self.places[x], Place)]
        counted = [place for place in given if place.is_counted]
        is_counted = not held and bool(longer or counted)
        # Such a value is the same for each position, until an op works along positions.
        is_repeated = all(place.is_uniform or place.is_repeated for place in counted) and ops.repeats(
            node, bool(counted)
        )
        return dataclasses.replace(found, is_counted=is_counted, is_repeated=is_counted and is_repeated)

    def _of_call(self, node: fx.Node) -> Place | Mixes:
        call = wrapped.owner(self.mirror, node)
        try:
            found = ops.place(self, node) if call is None else wrapped.place(self, node, call)
        except AxisError as error:
            found = Mixes(at=node, why=str(error))
        if isinstance(found, Mixes) and found.op is None and found.at is node:
            return dataclasses.replace(found, op=wrapped.name(self.mirror, node))
        return found

    def _scaled(self, node: fx.Node, found: Place) -> Place | Mixes:
        """Refuse a factor that looks like the length of a part: it would be another one for the whole sequence."""
        value = node.meta.get("val")
        if node.target not in ops.SCALES or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return found
        numbers = [x for x in node.args if isinstance(x, (int, float))]
        held = {atom for atom in axes.flat(found.dims) if atom in self.atoms}
        if any(is_of_length(x, int(atom.size)) for x in numbers for atom in held):
            return Mixes(
                at=node, why=f"a factor of {numbers[0]:g} may come from the length of a part", remedy=IF_CHANCE
            )
        return found

    def _leaf(self, node: fx.Node) -> Place | Mixes:
        x = self._value(node)
        if not isinstance(x, torch.Tensor):
            return Place(dims=())
        dims = axes.fresh(axes.shape_exprs(x))
        dynamo = self.mirror.dynamo_node(node)
        one = None if dynamo is None else self._given.get(dynamo)
        if one is not None:
            dims = (*dims[: one.axis], (self._atoms[one.length],), *dims[one.axis + 1 :])
        return wrapped.on_other_ranks(self, node, Place(dims=dims), x)

    def _as_allowed(self, node: fx.Node) -> Place:
        """Place the result of an op that the user allows: as its first operand of that shape, or without sequence."""
        value = self._value(node)
        if not isinstance(value, torch.Tensor):
            return Place(dims=())
        for x in node.all_input_nodes:
            place = self.places[x]
            given = self._value(x)
            if isinstance(place, Place) and isinstance(given, torch.Tensor) and given.shape == value.shape:
                return place
        return Place(dims=axes.fresh(axes.shape_exprs(value)))

    def _of_site(self, node: fx.Node, site: Site) -> Place | Mixes:
        """Place an attention's output, which has the positions of its queries."""
        match = site.match
        found = self.sequence_of(match.q.node, match.q.dims, match.axes.query)
        if found is None:
            return Place(dims=axes.fresh(axes.shape_exprs(node.meta["val"])))
        query = axes.resolve(match.axes.query)
        known: dict[Atom, Atom] = {}
        dims: list[tuple[Atom, ...]] = []
        for dim in match.out_dims:
            own = []
            for atom in axes.resolve(dim):
                is_query = atom in query and atom.size != axes.ONE
                own.append(found if is_query else known.setdefault(atom, Atom(atom.size)))
            dims.append(tuple(own))
        return Place(dims=tuple(dims))

    def sequence_of(self, node: fx.Node, dims: Dims, wanted: tuple[Atom, ...]) -> Atom | None:
        """Return the sequence that an operand holds along one axis of a site; None if it holds none there. Raises CannotShard.

        dims: of the operand, in the site's atoms. wanted: the site's axis.
        """
        place = self.places[node]
        if isinstance(place, Mixes):
            raise refused(place)
        sought = {atom for atom in axes.resolve(wanted) if atom.size != axes.ONE}
        found: set[Atom] = set()
        has_any = any(atom in self.atoms for atom in axes.flat(place.dims))
        for own, theirs in zip(place.dims, dims, strict=True):
            of_sequence = [atom for atom in axes.resolve(own) if atom in self.atoms]
            of_site = [atom for atom in axes.resolve(theirs) if atom in sought]
            if bool(of_sequence) != bool(of_site) and (of_sequence or has_any):
                raise CannotShard(
                    "the sequence of q, k and v is their axis of positions",
                    f"{node.name} holds it along another one",
                    at=node,
                )
            found.update(of_sequence)
        if len(found) > 1 or (found and len(sought) != 1):
            raise CannotShard("q, k and v each hold one sequence", f"{node.name} holds several", at=node)
        return next(iter(found), None)


def refused(found: Mixes) -> CannotShard:
    """Return the exception for an op that mixes positions."""
    op = found.op or str(found.at.target)
    return CannotShard(
        "outside of attention, each position of the sequence is computed by itself",
        f"{op}: {found.why}",
        at=found.at,
        remedy=found.remedy
        or f"if its result is right for a part of the sequence, give ContextParallel(..., allow=('{op}',))",
    )
