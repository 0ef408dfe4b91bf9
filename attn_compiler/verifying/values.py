"""Real values for the nodes of a mirror and of a rewritten graph, from values recorded in its own run; and checks of them.

A node that the model's own graph has too is a leaf: its value was recorded. Any other is computed from its inputs.
"""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import sympy
import torch
from torch import fx
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from attn_compiler.passes.graph import axes, mutation, views
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.passes.graph.site import Site
from attn_compiler.verifying.comparing import Compared
from attn_compiler.verifying.interpreting import with_rows


class Key(NamedTuple):
    """A value to record: of the node `name` of the model's own graph, in the body of that index. after: the node of that graph after which
    the tensor holds it, None: from its creation. copied: something writes to the tensor later."""

    body: int
    name: str
    after: str | None = None
    copied: bool = False


#: the placeholder of every value in a rehearsal
_REHEARSED = torch.empty(0)


class NoValueError(Exception):
    """A value is unavailable outside of the compiled graph, with the reason. Internal: the check is skipped."""


@dataclass(kw_only=True, eq=False)
class Body:
    """One prepared unit: the data kept once the graph is given away to the compiler.

    index: its place among the bodies. original: the names of the nodes that mean the same in the model's own graph, in the mirror and in
    the rewritten graph. rewritten: a copy of the rewritten graph. outs: name of a site's new output -> name of the old one. names: mirror
    node -> the name of its recorded value. made: mirror node -> the node of the rewritten graph with its value, if only that graph has one.
    named: the first mirror node recorded under a name. given: the name of a further input of the rewritten graph (body_inputs.py) -> the
    caller's value for it.
    """

    index: int
    original: frozenset[str]
    rewritten: fx.Graph
    mirror: Mirror
    outs: dict[str, str] = field(default_factory=dict)
    names: dict[fx.Node, str] = field(default_factory=dict)
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)
    named: dict[str, fx.Node] = field(default_factory=dict)
    given: dict[str, Key] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rewritten = {node.name: node for node in self.rewritten.nodes}
        for node in self.mirror.graph.nodes:
            dynamo = self.mirror.dynamo_node(node)
            value = dynamo.meta.get("example_value") if dynamo is not None else None
            # A tensor inside a transform of torch.func has no value once the transform is over.
            if dynamo is None or (isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)):
                continue
            if dynamo.name in self.original:
                self.names[node] = dynamo.name
                self.named.setdefault(dynamo.name, node)
            elif dynamo.name in rewritten:
                self.made[node] = rewritten[dynamo.name]

    @property
    def written(self) -> set[StorageWeakRef]:
        """The memory that something in the mirror writes to."""
        return set().union(*(memory for _, memory in self.mirror.writers))

    def place(self, made: fx.Node) -> int:
        """Return the mirror's place for a node that only the rewritten graph has: right before the model's next computation."""
        following = made.next
        while following.op != "output":
            if following.name in self.original and following.name in self._places:
                return self._places[following.name]
            following = following.next
        return len(self.mirror.graph.nodes)

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        """Places in the mirror where the computation of each of the model's nodes begins."""
        owners = [self.mirror.owner(node) for node in self.mirror.graph.nodes]
        return {owner.name: place for place, owner in reversed(list(enumerate(owners))) if owner is not None}

    def recorded_at(self, version: Version) -> Key:
        """Return the key of a tensor's contents between two writes. Raises NoValueError if that is inside of one call of the graph."""
        node, since, until = version.node, version.since, version.until
        mirror, name = self.mirror, self.names[node]
        written = since is not None and mirror.order(since) >= mirror.order(node)
        call = mirror.owner(since if since is not None and written else node)
        if until is not None and call is not None and call is mirror.owner(until):
            raise NoValueError(f"what {name} holds inside one call of the graph was not recorded")
        after = call.name if written and call is not None and call.name != name else None
        return Key(self.index, name, after, copied=until is not None)


@dataclass(kw_only=True, eq=False)
class Values:
    """bodies: by the graph of their mirrors. recorded: values of the model's own nodes. symbols: of the symbolic sizes. asked: in a
    rehearsal, the keys read so far. Then no value is known and no node is run: every value is an empty tensor."""

    bodies: Mapping[fx.Graph, Body]
    recorded: dict[Key, Any] = field(default_factory=dict)
    symbols: dict[str, int] = field(default_factory=dict)
    asked: set[Key] | None = None

    def needs(self, read: Callable[[Values], object]) -> set[Key]:
        """Return the keys that a reading needs, by a rehearsal. Raises NoValueError if it is impossible."""
        asked: set[Key] = set()
        read(Values(bodies=self.bodies, asked=asked))
        return asked

    def read(self, key: Key) -> Any:
        """Return the value recorded under a key. A rehearsal, which has no values yet, notes the key and returns a placeholder."""
        if self.asked is None:
            return self.recorded[key]
        self.asked.add(key)
        return _REHEARSED

    def size(self, size: Any) -> int:
        """Return a size as a number. Raises NoValueError."""
        expr: sympy.Expr = axes.size_expr(size) if isinstance(size, torch.SymInt) else size
        if self.asked is not None:
            return 0
        missing = {str(s) for s in expr.free_symbols} - self.symbols.keys()
        if missing:
            raise NoValueError(f"the size {expr} is not known on the first call")
        return int(expr.subs({s: self.symbols[str(s)] for s in expr.free_symbols}))

    # ---- the mirror -----------------------------------------------------------------------------------------------

    def body(self, node: fx.Node) -> Body:
        """Return the body that a mirror node is in. Raises NoValueError."""
        if node.graph not in self.bodies:
            raise NoValueError(f"{node.name} is in a graph that was not recorded")
        return self.bodies[node.graph]

    def tensor(self, node: fx.Node, when: int | None = None) -> torch.Tensor:
        """Return `mirror` of a node that has to be a tensor."""
        found = self.mirror(node, when)
        if not isinstance(found, torch.Tensor):
            raise NoValueError(f"{node.name} is no tensor")
        return found

    def at(self, version: Version) -> torch.Tensor:
        """Return a tensor at that version. Raises NoValueError."""
        return self.tensor(version.node, self.when(version))

    def when(self, version: Version) -> int:
        """Return a place in its mirror where a tensor has that version. Raises NoValueError."""
        mirror = self.body(version.node).mirror
        return len(mirror.graph.nodes) if version.until is None else mirror.order(version.until)

    def mirror(self, node: fx.Node, when: int | None = None) -> Any:
        """Return the real value of a mirror node, or its number. Raises NoValueError. when: right before that place in the order of its
        mirror; None: as it is now, in the run of the model's own graph."""

        @functools.cache
        def value(node: fx.Node, when: int | None) -> Any:
            if isinstance(node.meta.get("val"), torch.SymInt):
                return self.size(node.meta["val"])
            body = self.body(node)
            if node in body.names:
                now = Key(body.index, body.names[node])
                return self.read(now if when is None else body.recorded_at(mutation.version(body.mirror, node, when)))
            if when is not None and mutation.storages(node) & body.written:
                raise NoValueError(f"{node.name} exists only inside one call of the graph, and is written in place")
            if node in body.made:
                return self.rewritten(body, body.made[node])
            require_computable(node)
            if node.op == "get_attr":
                return node.meta["constant"]
            # An unwritten node reads its inputs at its own place: older aliases of their memory are unwritten, too.
            before = None if when is None else body.mirror.order(node)
            return self.call(node, lambda n: value(n, before))

        try:
            return value(node, when)
        finally:
            # The function refers to itself, and would hold the values until it is collected.
            value.cache_clear()

    # ---- the rewritten graph --------------------------------------------------------------------------------------

    def rewritten(self, body: Body, node: fx.Node) -> Any:
        """Compute the rewritten graph at `node` from the model's own values. Raises NoValueError."""

        @functools.cache
        def made(one: fx.Node) -> Any:
            if one.op not in ("call_function", "call_method"):
                raise NoValueError(f"{one.name} of the rewritten graph is not in the model's own graph")
            return self.call(one, lambda source: given(source, one))

        def given(source: fx.Node, reader: fx.Node) -> Any:
            """Read a node that the model has too, as `reader`, a node of this graph alone, reads it."""
            name = body.outs.get(source.name, source.name)
            if source is node or (source.name not in body.given and name not in body.original):
                return made(source)
            if source.name in body.given:
                return self.read(body.given[source.name])
            mirrored = body.named.get(name)
            if mirrored is None or not mutation.storages(mirrored) & body.written:
                return self.read(Key(body.index, name))
            return self.read(body.recorded_at(mutation.version(body.mirror, mirrored, body.place(reader))))

        return made(node)

    def call(self, node: fx.Node, value: Callable[[fx.Node], Any], *, dtype: torch.dtype | None = None) -> Any:
        """Run one node on the values of its inputs. dtype: replaces every floating dtype among its arguments."""

        def real(x: Any) -> Any:
            if isinstance(x, fx.Node):
                x = value(x)
            if isinstance(x, torch.dtype) and dtype is not None and x.is_floating_point:
                return dtype
            return self.size(x) if isinstance(x, torch.SymInt) else x

        args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), real)
        if self.asked is not None:
            return _REHEARSED
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        args, kwargs = with_rows(node.target, args, kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def require_computable(node: fx.Node) -> None:
    """Raise NoValueError unless running the mirror node by itself gives its value and changes nothing else."""
    if node.op == "get_attr" and isinstance(node.meta.get("constant"), torch.Tensor):
        return
    if node.op != "call_function" or not (
        isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
    ):
        raise NoValueError(f"{node.name} exists only inside one call of the graph")
    if mutation.writes(node):
        raise NoValueError(f"{node.name} is written in place inside one call of the graph")
    if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
        # SDPA and dropout are tagged so even if they drop nothing.
        rate = views.argument(node, "dropout_p", views.argument(node, "p"))
        if rate != 0 and views.argument(node, "train") is not False:
            raise NoValueError(f"{node.name} draws random numbers inside one call of the graph")


@dataclass(kw_only=True, eq=False)
class Check(ABC):
    """One comparison for one site. needs: values to record first. skipped: why it can't be compared, if so."""

    #: as in Verification
    subject: ClassVar[str]

    site: Site
    body: Body
    needs: set[Key] = field(default_factory=set)
    skipped: str | None = None

    @property
    def formula(self) -> str | None:
        """The recovered mask or bias, for people."""
        return None

    @abstractmethod
    def read(self, values: Values) -> object:
        """Read the inputs of `compare`. Raises NoValueError."""

    @abstractmethod
    def compare(self, values: Values) -> Compared:
        """Compare. Raises VerificationMismatch, or NoValueError."""

    def find_needs(self, values: Values) -> None:
        """Find the values to record by a rehearsal."""
        try:
            self.needs = values.needs(self.read)
        except NoValueError as error:
            self.skipped = str(error)
