"""The reader of elements, and helpers of all rules: conversions, and the indices of an operand that broadcasts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import sympy
import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Load, Ranges
from attn_compiler.index_expr.ranges import LOADED, LOADED_KEY
from attn_compiler.passes.graph import axes, mutation
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.passes.recovering.reading import naming, per_example
from attn_compiler.passes.recovering.reading.budget import Budget
from attn_compiler.passes.recovering.reading.converting import (
    IN_MEMORY,
    LONGEST,
    computed,
    converted,
    fits,
    kind_of_dtype,
    largest_loaded,
    ranges,
)
from attn_compiler.passes.recovering.reading.nodes import fake, symbolic
from attn_compiler.torch_private import symbols as torch_symbols

At = tuple[Expr, ...]
ReadOp = Callable[["Reader", fx.Node, At], Expr | None]

#: a tensor, indices in it, and the last node that wrote to it before
_Key = tuple[fx.Node, At, fx.Node | None]

#: (condition, indices): where the condition holds, a view has an element, at these indices of the view
Inside = tuple[Expr, At]

#: (tensor that is written to, another tensor in its memory, indices in the latter) -> the written element; None: unknown
Reach = Callable[[fx.Node, fx.Node, At], Inside | None]

#: The most nested reads on Python's stack. Deeper ones are read first, from the inside out
_AT_ONCE = 24

#: Ops whose results may have wrapped around, so that they may be any number of their dtype
_GROWING = frozenset(
    {"add", "sub", "rsub", "mul", "neg", "abs", "pow", "square", "prod", "cumprod", "diff", "arange"}
    | {"bitwise_not", "bitwise_xor", "bitwise_or", "bitwise_left_shift", "__lshift__", "__xor__", "__or__"}
    | {"full", "full_like", "new_full", "scalar_tensor", "fill"}
)


class InputOrigins(Protocol):
    """Reads inputs of a graph where they come from. are_of_body: the graph is a body, and its inputs come from its callers."""

    are_of_body: bool

    def element(self, reader: Reader, node: fx.Node, at: At) -> Expr | None:
        """The element of an input at `at`, its loads entered in reader.tensors; None if it is not the same at every call."""
        ...


class Unreadable(Exception):
    """Reading would be wrong or endless; the text says why. Internal: the mask stays dense, with this reason."""


class _Exhausted(Exception):
    """The budget for one mask is spent; the text says which part of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Moment:
    """The node that is being read, as it is right before the place `when` in the order of the mirror. None: nothing yet."""

    node: fx.Node | None
    when: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Request:
    """A request for an element: the version of a tensor, indices, the moment, and the number of nested requests."""

    version: Version
    at: At
    moment: _Moment
    in_a_row: int

    @property
    def key(self) -> _Key:
        return self.version.node, self.at, self.version.since


class _Deeper(Exception):
    """The request must be read before the element that depends on it, which is then read again."""

    def __init__(self, request: _Request) -> None:
        self.request = request


class Reader:
    """Reads elements of one mirror's nodes. rules: by ATen op. reach: the elements that a write reaches. inputs: reads the
    graph's inputs where they come from.

    tensors: the tensor behind each name that a load uses, at a version between two writes to its memory. Its node belongs to
    this mirror or, if an input of a body was followed, to the mirror of a graph that calls the body:
    `tensors[name].node.graph` is that mirror's graph. not_followed: names of a body's inputs that could not be followed.
    too_large: names of tensors that were not read because their formula would be too large, each with its size.
    budget: the limits for reading one element. An element beyond them is Unreadable.
    longer: axis sizes for which indices run further than the tensors do, and how far (`Readers.longer`).

    An expression holds at one place of the graph: an op reads its inputs as they are when it runs, through
    views too. A later write to a tensor is read by the rule of that write. Without a rule the element is a load.
    """

    def __init__(
        self,
        mirror: Mirror,
        rules: Mapping[object, ReadOp],
        reach: Reach,
        inputs: InputOrigins | None = None,
        budget: Budget | None = None,
        longer: Mapping[int, int] | None = None,
    ) -> None:
        self.mirror = mirror
        self.longer = longer or {}
        self._rules = rules
        self._reach = reach
        self._inputs = inputs
        self._varies = per_example.regions_of(mirror)
        self.budget = budget or Budget.of_graph(len(mirror.graph.nodes))
        self._known: dict[_Key, Expr] = {}
        self._refused: dict[_Key, str] = {}
        self._memory: dict[fx.Node, set[StorageWeakRef]] = {}
        self._moment = _Moment(node=None, when=len(mirror.graph.nodes))
        self._sizes: dict[sympy.Expr, int] = {}
        self._reading = 0
        self._in_a_row = 0
        self._steps = 0
        self._variables: dict[fx.Node | None, Index] = {}
        self.too_large: dict[str, str] = {}
        self.tensors: dict[str, Version] = {}
        self._largest: dict[str, int] = {}
        self.not_followed: set[str] = set()

    def read_at(self, when: int, node: fx.Node, at: At) -> Expr:
        """The element of `node` at `at`, right before the place `when` in the order of the mirror. Raises Unreadable."""
        with self._at(_Moment(node=None, when=when)):
            return self.read(node, at)

    def read(self, node: fx.Node, at: At) -> Expr:
        """Return the element of `node` at `at`, one expression a dimension. Raises Unreadable.

        A rule gets the element as its op reads it. Other callers get it as it is at the end of the graph.
        """
        version = self._version(node)
        moment = _Moment(node=node, when=self._when(node))
        request = _Request(version=version, at=at, moment=moment, in_a_row=self._in_a_row + 1)
        known = self._known.get(request.key)
        if known is not None:
            return known
        if request.key in self._refused:
            raise Unreadable(self._refused[request.key])
        if self._reading == 0:
            return self._from_the_start(request)
        if self._reading == _AT_ONCE:
            raise _Deeper(request)
        return self._carried_out(request)

    def _from_the_start(self, request: _Request) -> Expr:
        """Read an element with a budget of its own. Raises Unreadable, with the same reason on every later request."""
        self._steps = 0
        try:
            return self._in_turn(request)
        except _Exhausted as exhausted:
            self._refused[request.key] = str(exhausted)
            raise Unreadable(str(exhausted)) from None

    def _in_turn(self, request: _Request) -> Expr:
        """Read an element, after the elements that it depends on and that are nested too deeply."""
        waiting = [request]
        while True:
            try:
                found = self._carried_out(waiting[-1])
            except _Deeper as deeper:
                waiting.append(deeper.request)
                continue
            except Unreadable as unreadable:
                self._refused[waiting[-1].key] = str(unreadable)
                if len(waiting) == 1:
                    raise
            else:
                if len(waiting) == 1:
                    return found
            waiting.pop()

    def _carried_out(self, request: _Request) -> Expr:
        self._steps += 1
        if self._steps > self.budget.steps:
            raise _Exhausted(
                f"it takes more than {self.budget.steps} steps to read, {self.budget.steps} are the most for a graph of "
                f"{len(self.mirror.graph.nodes)} ops"
            )
        if request.in_a_row > self.budget.in_a_row:
            raise _Exhausted(f"it is made by more than {self.budget.in_a_row} ops in a row")
        outer, self._in_a_row = self._in_a_row, request.in_a_row
        self._reading += 1
        try:
            with self._at(request.moment):
                self._known[request.key] = self._read(request.version, request.at)
        finally:
            self._reading -= 1
            self._in_a_row = outer
        return self._known[request.key]

    @contextlib.contextmanager
    def _at(self, moment: _Moment) -> Iterator[None]:
        outer, self._moment = self._moment, moment
        try:
            yield
        finally:
            self._moment = outer

    def _version(self, node: fx.Node) -> Version:
        return mutation.version(self.mirror, node, self._when(node))

    def _when(self, source: fx.Node) -> int:
        """Return when the current node reads this input. A view reads it when it is read itself, another op when it runs."""
        reading, when = self._moment.node, self._moment.when
        if reading is None or (self._is_view_of(reading, source)):
            return when
        return self.mirror.order(reading)

    def _is_view_of(self, node: fx.Node, source: fx.Node) -> bool:
        return bool(self._storages(node) & self._storages(source)) and not mutation.writes(node)

    def _storages(self, node: fx.Node) -> set[StorageWeakRef]:
        if node not in self._memory:
            self._memory[node] = mutation.storages(node)
        return self._memory[node]

    def _read(self, version: Version, at: At) -> Expr:
        node = version.node
        if (reshaped := mutation.reshaped(self.mirror, self._storages(node))) is not None:
            raise Unreadable(f"{node.name} changes its shape in place, by {reshaped.name}")
        found = self._written(version, at) if self._is_written_since_made(version) else self._looked_into(node, at)
        reason = None if found is None else self.budget.too_large(found.facts.size, found.facts.depth)
        if found is not None and reason is None:
            return found
        load = self._load(version, at)
        if reason is not None:
            self.too_large[load.tensor] = reason
        return load

    def _is_written_since_made(self, version: Version) -> bool:
        """True if a write changed the tensor after its op. False for a view: its base tensor is checked instead."""
        node, since = version.node, version.since
        if since is None or any(self._is_view_of(node, source) for source in node.all_input_nodes):
            return False
        return self.mirror.order(since) > self.mirror.order(node)

    def _written(self, version: Version, at: At) -> Expr | None:
        """Return the element after the last write: the written one or the one before; None if the write is not understood."""
        node, since = version.node, version.since
        target = mutation.returned(since) if since is not None else None
        place = self._reach(target, node, at) if target is not None else None
        if since is None or place is None:
            return None
        reached, own = place
        before = None if reached == ix.TRUE else self.read_at(self.mirror.order(since), node, at)
        if isinstance(before, Load) and self.tensors[before.tensor].node is self.mirror.first_name(node):
            # For an unreadable tensor, one load after the write says as much as a load before it and the written value.
            return None
        if reached == ix.FALSE:
            return before
        with self._at(_Moment(node=since, when=self._moment.when)):
            value = self._looked_into(since, own)
        return value if value is None or before is None else ix.where(reached, value, before)

    def _looked_into(self, node: fx.Node, at: At) -> Expr | None:
        held = self.mirror.constant(node)
        if held is not None and held.numel() == 1:
            return Const(held.item())
        if node.op == "placeholder" and self._inputs is not None:
            return self._inputs.element(self, node, at)
        rule = self._rules.get(node.target)
        return None if rule is None else rule(self, node, at)

    def varies(self, node: fx.Node) -> bool:
        """True if the node belongs to one example of a vmap: this tensor does not exist outside that vmap."""
        return bool(self._varies.get(node))

    def load(self, node: fx.Node, at: At) -> Expr:
        """Return a load from the tensor itself, as it is at the time of reading. Raises Unreadable if there is no such tensor."""
        return self._load(self._version(node), at)

    def load_at(self, when: int, node: fx.Node, at: At) -> Expr:
        """Return the load right before the place `when` in the order of the mirror."""
        with self._at(_Moment(node=None, when=when)):
            return self.load(node, at)

    def _load(self, version: Version, at: At) -> Load:
        if self.varies(version.node):
            raise Unreadable(f"{version.node.name} is computed inside of a vmap")
        version = dataclasses.replace(version, node=self.mirror.first_name(version.node))
        node = version.node
        name, short = naming.name_of(self.mirror, node), naming.users_name(self.mirror, node)
        name = short if self.tensors.setdefault(short, version).node is node else name
        # A node of the mirror alone may have the name of another node of Dynamo's, and a node of a body that of one of its caller.
        while self.tensors.setdefault(name, version) != version:
            name += "'"
        if node.op == "placeholder" and self._inputs is not None and self._inputs.are_of_body:
            self.not_followed.add(name)
        return Load(name, at, kind_of_dtype(fake(node).dtype))

    def within(self, x: Expr, node: fx.Node, at: At) -> Ranges:
        """Return ranges of the indices, sizes and loads in x, if x is computed for the element of `node` at `at`."""
        known = {name: self._largest_size(node, sympy.Symbol(name)) for name in ix.sizes(x)}
        for tensor in x.facts.tensors & self.tensors.keys():
            if tensor not in self._largest:
                self._largest[tensor] = _largest_element(self.tensors[tensor].node)
            # The bound of any load is left out: bounds are cached by these ranges, and fewer different ones mean more hits.
            if self._largest[tensor] != LOADED:
                known[LOADED_KEY.format(tensor)] = self._largest[tensor]
        longest = functools.partial(self._largest_size, node)
        shape = [self.longer.get(size, size) if isinstance(size, int) else size for size in fake(node).shape]
        return ranges(x, shape, at, longest=lambda size: longest(axes.size_expr(size)), named=known)

    def _largest_size(self, node: fx.Node, size: sympy.Expr) -> int:
        """Return the largest value of a size. Guards LONGEST if nothing is known and the size is within it in this call."""
        if size not in self._sizes:
            self._sizes[size] = torch_symbols.largest(fake(node), size, LONGEST) or IN_MEMORY
        return self._sizes[size]

    def scan_variable(self) -> Index:
        """The bound variable of the cumulative op that is being read."""
        return self._variables.setdefault(self._moment.node, Index(f"j{len(self._variables) + 1}"))

    def operand(self, x: Any, shape: torch.Size, at: At) -> Expr | None:
        """An argument of a pointwise op: a number, or a tensor that broadcasts to `shape`."""
        if isinstance(x, (bool, int, float)):
            return Const(x)
        if isinstance(x, torch.SymInt):
            return symbolic(x)
        if not isinstance(x, fx.Node):
            return None
        if isinstance(x.meta.get("val"), torch.SymInt):
            return symbolic(x.meta["val"])
        return self.read(x, broadcast(fake(x), at)) if isinstance(x.meta.get("val"), torch.Tensor) else None


def broadcast(value: torch.Tensor, at: At) -> At:
    """The indices of an operand that broadcasts: the last ones, 0 along axes of size one."""
    own = at[len(at) - value.dim() :]
    return tuple(ix.ZERO if axes.size_expr(s) == axes.ONE else i for i, s in zip(own, value.shape, strict=True))


def _largest_element(node: fx.Node) -> int:
    """Return n if the elements of an integer tensor lie from -n - 1 to n. LOADED for truth values and floats."""
    if kind_of_dtype(fake(node).dtype) != "int":
        return LOADED
    name = str(getattr(node.target, "overloadpacket", "")).removeprefix("aten.")
    return largest_loaded(fake(node).dtype, by_arithmetic=name in _GROWING or name.removesuffix("_") in _GROWING)


def converted_of(reader: Reader, x: Expr, node: fx.Node, source: torch.dtype | None, at: At) -> Expr | None:
    """Convert x, of dtype `source` (None for a number), to the dtype of `node`, whose element at `at` it is; None if it may wrap."""
    return converted(x, source, fake(node).dtype, reader.within(x, node, at))


def computed_of(reader: Reader, x: Expr, node: fx.Node, at: At) -> Expr | None:
    """Convert the result x of arithmetic to the dtype of `node`, whose element at `at` it is; None if it may wrap around."""
    dtype = fake(node).dtype
    if dtype == torch.bool:
        return ix.as_bool(x)
    within = reader.within(x, node, at)
    if dtype.is_floating_point:
        return computed(x, dtype, within)
    return x if fits(x, dtype, within) else None
