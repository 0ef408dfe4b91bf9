"""Two ways to carry out the same calls: on fake values, to know the results, and into the Dynamo graph."""

from __future__ import annotations

import contextlib
import functools
import operator
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from attn_compiler.passes.graph import axes, mutation, regions
from attn_compiler.passes.graph.axes import AxisError, Size
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.passes.graph.regions import Region
from attn_compiler.passes.graph.values import EmittedValues
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import snapshots as torch_snapshots, symbols as torch_symbols, tracing as torch_tracing

X = TypeVar("X")

#: makes a buffer of a site for `GraphBuilder.buffer`, from its name and fake value
MakeBuffer = Callable[[str, torch.Tensor], tuple[fx.Node, fx.Node]]
#: brings a tensor of another graph into this one, for `GraphBuilder.loaded`
Carry = Callable[[Version], fx.Node]
#: takes the texts of `GraphBuilder.note`
Note = Callable[[str], None]
#: gives the reason why a kernel that saves a tensor has to save a copy, for `GraphBuilder.loaded`; None if it need not
Keep = Callable[[fx.Node], str | None]


@dataclass(frozen=True, kw_only=True)
class Held:
    """A copy that a site's kernel reads in place of an operand. node: makes the copy. why: the reason for it."""

    node: fx.Node
    operand: str
    why: str


class Builder(Protocol[X]):
    """Carries out calls on values of type X: fake tensors or graph nodes."""

    def leaf(self, node: fx.Node) -> X:
        """Return the value of a mirror node that exists in the Dynamo graph."""
        ...

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> X: ...

    def value(self, x: X) -> torch.Tensor: ...

    def size(self, size: Size, known: list[fx.Node]) -> Any:
        """Return a number for a size expression; a symbolic one is read off a dimension of one of the `known` mirror nodes."""
        ...

    def once(self, key: Any, make: Callable[[], X]) -> X:
        """Return make(), or its earlier result for an equal key."""
        ...

    def hold(self, x: X, key: Any, *, operand: str, why: str) -> X:
        """Return a copy of x that no later write reaches, in the backward either; one copy for all calls with the same key."""
        ...


def example(mirror: Mirror, node: fx.Node) -> Any:
    """Return Dynamo's own value for a mirror node: the one with the true dtype, strides and requires_grad."""
    dynamo = mirror.dynamo_node(node)
    if dynamo is None:
        raise AxisError(f"{node.name} exists only inside one call of the graph")
    return dynamo.meta["example_value"]


@dataclass(frozen=True, kw_only=True)
class SizeSource:
    """A place to read a size from: it is `times` the dimension of a mirror node, divided by `by`, without remainder."""

    node: fx.Node
    dim: int
    times: int = 1
    by: int = 1

    def size(self, length: X, call: Callable[[Callable[..., Any], X, int], X]) -> X:
        """Compute the size from the length of that dimension."""
        length = length if self.times == 1 else call(operator.mul, length, self.times)
        return length if self.by == 1 else call(operator.floordiv, length, self.by)


def find_size(mirror: Mirror, mode: FakeTensorMode, size: Size, known: list[fx.Node]) -> int | SizeSource:
    """Return a number, or a dimension of the `known` nodes that has this size or a multiple or fraction of it.

    Raises AxisError if none has.
    """
    size = torch_symbols.simplified(mode, size)
    if size.is_Integer:
        return int(size)
    found: SizeSource | None = None
    for node in known:
        for dim, length in enumerate(axes.shape_exprs(example(mirror, node))):
            ratio = axes.ratio(size, length)
            if ratio == 1:
                return SizeSource(node=node, dim=dim)
            if found is None and ratio is not None:
                found = SizeSource(node=node, dim=dim, times=int(ratio.p), by=int(ratio.q))
    if found is None:
        raise AxisError(f"no tensor of the site has the size {size}")
    return found


def copied_before(mirror: Mirror, version: Version, at: fx.Node) -> fx.Node | None:
    """Return the Dynamo node before which a tensor has to be copied, so that its value of then can be read right before `at`.

    None: its value is the same at `at`. at: a mirror node with a Dynamo node. Raises AxisError where the tensor belongs to another graph or
    exists only inside one call, does not have that value yet, or carries a gradient that a copy might lose.
    """
    node = version.node
    if node.graph is not mirror.graph:
        raise AxisError(f"{node.name} is a tensor of the graph that calls this body")
    wants_gradient = bool(example(mirror, node).requires_grad)
    place, _ = _span(mirror, at, mirror.dynamo_node(at))
    if version.since is not None and _span(mirror, version.since)[1] >= place:
        raise AxisError(f"{node.name} is not read before {version.since.name} writes to it")
    if version.until is None or (begin := _span(mirror, version.until)[0]) >= place:
        return None
    writer = mirror.owner(version.until)
    made = [n for n in (node, version.since) if n is not None and n.op != "placeholder"]
    if writer is None or any(_span(mirror, n)[1] >= begin for n in made):
        raise AxisError(f"{node.name} is made and written in place, by {version.until.name}, inside of one call")
    if wants_gradient:
        raise AxisError(f"{node.name} wants a gradient, and is written in place, by {version.until.name}")
    return writer


def holds_from(mirror: Mirror, version: Version, place: int) -> bool:
    """Return whether a tensor has this value right before a place in the order of its mirror, and ever after."""
    return version.until is None and (version.since is None or _span(mirror, version.since)[1] < place)


def _span(mirror: Mirror, node: fx.Node, dynamo: fx.Node | None = None) -> tuple[int, int]:
    """Return the first and last place in the mirror of the nodes made for a Dynamo node: the one given, or the owner of `node`."""
    dynamo = dynamo or mirror.owner(node)
    places = [mirror.order(n) for n in mirror.owned(dynamo)] if dynamo is not None else []
    return (min(places), max(places)) if places else (mirror.order(node), mirror.order(node))


class FakeBuilder(Generic[X]):
    """Runs calls on fake values and leaves the graph alone."""

    def __init__(self, mirror: Mirror, mode: FakeTensorMode) -> None:
        self._mirror = mirror
        self._mode = mode
        self._values = EmittedValues(mode)

    def leaf(self, node: fx.Node) -> Any:
        return example(self._mirror, node)

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            with torch_tracing.running_in(self._mode), torch.no_grad():
                return function(*args, **kwargs)

        return self._values.of_values(function, args, kwargs, run)

    def value(self, x: Any) -> torch.Tensor:
        tensor: torch.Tensor = x
        return tensor

    def size(self, size: Size, known: list[fx.Node]) -> Any:
        found = find_size(self._mirror, self._mode, size, known)
        if isinstance(found, int):
            return found
        return found.size(example(self._mirror, found.node).shape[found.dim], lambda function, *args: function(*args))

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        return make()

    def hold(self, x: Any, key: Any, *, operand: str, why: str) -> Any:
        return self.call(torch.ops.attn_compiler.held.default, x)


class GraphBuilder:
    """Writes nodes into the Dynamo graph, each with its value, source line and module path.

    Values that several sites share are made once, before the first site. They are made once for each grad mode: a tensor made under no_grad
    would lose its gradient. held: the copies read by the site that is, or was last, emitted. made: every node so far.
    """

    def __init__(self, graph: fx.Graph, mirror: Mirror, mode: FakeTensorMode) -> None:
        self._graph = graph
        self._mirror = mirror
        self.mode = mode
        self._shared: dict[Any, fx.Node] = {}
        self._replaced: dict[fx.Node, fx.Node] = {}
        self._versions: dict[fx.Node, fx.Node | None] = {}
        self._place: fx.Node | None = None
        self._origin: fx.Node | None = None
        self._with_grad = False
        self._target: Target | None = None
        self._note: Note | None = None
        self._buffers: MakeBuffer | None = None
        self._carry: Carry | None = None
        self._keep: Keep | None = None
        self._made: list[fx.Node] = []
        self._values = EmittedValues(mode)
        self.held: list[Held] = []

    @property
    def made(self) -> Sequence[fx.Node]:
        return self._made

    @property
    def target(self) -> Target:
        if self._target is None:
            raise ValueError("nothing is emitted outside of a site")
        return self._target

    def note(self, text: str) -> None:
        if self._note is not None:
            self._note(text)

    @contextlib.contextmanager
    def at(
        self,
        node: fx.Node,
        *,
        with_grad: bool,
        target: Target | None = None,
        note: Note | None = None,
        buffers: MakeBuffer | None = None,
        carry: Carry | None = None,
        keep: Keep | None = None,
    ) -> Iterator[fx.Node]:
        """Insert before the Dynamo node of this mirror node, in its name, and yield that Dynamo node."""
        self._origin, self._place, self._with_grad = self.leaf(node), node, with_grad
        self._target, self._note, self._buffers, self._carry = target, note, buffers, carry
        self._keep, self.held = keep, []
        try:
            with self._graph.inserting_before(self._origin):
                yield self._origin
        finally:
            self._origin = self._place = self._target = self._note = self._buffers = self._carry = None
            self._keep = None

    @contextlib.contextmanager
    def without_autocast(self) -> Iterator[None]:
        """Leave autocast inside the block, within `at`: a kernel's nodes say their dtypes themselves."""
        if self._origin is None:
            raise ValueError("where autocast is to be left is not known outside of `at`")
        region = self._regions[self._origin] if regions.has_autocast(self._graph) else Region()
        with regions.without_autocast(self._graph, region):
            yield

    @functools.cached_property
    def _regions(self) -> dict[fx.Node, Region]:
        """Return the autocast region of each node of the original graph. A site is inserted before such a node, and changes no region."""
        return regions.by_node(self._graph)

    def buffer(self, name: str, shape: tuple[int, ...]) -> tuple[fx.Node, fx.Node]:
        if self._buffers is None or self._origin is None:
            raise ValueError("buffers belong to a site")
        with torch_tracing.running_in(self.mode):
            value = torch.zeros(shape, device=self.value(self._origin).device)
        return self._buffers(name, value)

    def erase_unused(self, kept: Collection[fx.Node]) -> None:
        """Erase nodes made here that nothing reads, except `kept`: operands that no site's lowering took.

        A call without a value is kept: it has a side effect.
        """
        for node in reversed(self._made):
            if not node.users and node not in kept and node.meta["example_value"] is not None:
                self._graph.erase_node(node)
        self._made.clear()

    def forget_erased(self) -> None:
        """Stop sharing nodes of an attempt that was rolled back."""
        is_erased = torch_snapshots.is_erased
        self._shared = {key: node for key, node in self._shared.items() if not is_erased(node)}
        self._made = [node for node in self._made if not is_erased(node)]

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Put `new` in place of a Dynamo node, also for later sites that read it as a leaf."""
        old.replace_all_uses_with(new)
        self._replaced[old] = new

    def leaf(self, node: fx.Node) -> fx.Node:
        dynamo = self._mirror.dynamo_node(node)
        if dynamo is None:
            raise AxisError(f"{node.name} exists only inside one call of the graph")
        dynamo = self._replaced.get(dynamo, dynamo)
        if self._place is not None:
            self._versions[dynamo] = mutation.version(self._mirror, node, self._mirror.order(self._place)).since
        return dynamo

    def loaded(self, version: Version, name: str = "mask") -> fx.Node:
        """Return a tensor's value between two writes, for the nodes inserted here. To be used inside of `at`.

        It is the tensor itself, a copy from before the write, or, for a tensor of the calling graph, an input that stands for it. name: of
        the copy, in the report. Raises AxisError where none of these can be had (copied_before).
        """
        if self._place is None:
            raise ValueError("where to read the tensor is not known outside of `at`")
        if self._carry is not None and version.node.graph is not self._mirror.graph:
            return self._carry(version)
        writer = copied_before(self._mirror, version, self._place)
        if writer is None:
            leaf = self.leaf(version.node)
            why = None if self._keep is None else self._keep(version.node)
            return leaf if why is None else self.hold(leaf, version, operand=name, why=why)
        return self.once(("copied", version), lambda: self._copied(version.node, writer))

    def _copied(self, node: fx.Node, writer: fx.Node) -> fx.Node:
        """Copy a tensor right before a Dynamo node writes to it, in that node's name."""
        with self._graph.inserting_before(writer):
            origin, self._origin = self._origin, writer
            try:
                return self.call(torch.clone, self.leaf(node))
            finally:
                self._origin = origin

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> fx.Node:
        node = self._node(function, args, kwargs)
        if self._origin is not None:
            node.meta.update({k: v for k, v in self._origin.meta.items() if k != "example_value"})
        env = {x: x.meta["example_value"] for x in node.all_input_nodes}
        run = functools.partial(self._run, function, args, kwargs)
        node.meta["example_value"] = self._values.value_of(node, env, run, with_grad=self._with_grad)
        self._made.append(node)
        return node

    def _node(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """Add a call. A tensor's own methods are written like Dynamo's: AOTAutograd caches no graph that calls them as functions."""
        if isinstance(function, types.MethodDescriptorType):
            return self._graph.call_method(function.__name__, args, kwargs)
        return self._graph.call_function(function, args, kwargs)

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        values = fx.map_arg((args, kwargs), lambda n: _usable(n.meta["example_value"]))
        with torch_tracing.running_in(self.mode), torch.set_grad_enabled(self._with_grad):
            return function(*values[0], **values[1])

    def value(self, x: fx.Node) -> torch.Tensor:
        tensor: torch.Tensor = x.meta["example_value"]
        return tensor

    def size(self, size: Size, known: list[fx.Node]) -> Any:
        found = find_size(self._mirror, self.mode, size, known)
        if isinstance(found, int):
            return found
        length = self.call(torch.ops.aten.sym_size.int, self.leaf(found.node), found.dim)
        return found.size(length, self.call)

    def once(self, key: Any, make: Callable[[], fx.Node]) -> fx.Node:
        key = (self._with_grad, key)
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def hold(self, x: fx.Node, key: Any, *, operand: str, why: str) -> fx.Node:
        node = self.once(("held", key), lambda: self.call(torch.ops.attn_compiler.held.default, x))
        self.held.append(Held(node=node, operand=operand, why=why))
        return node

    def shared_mask(self, mask: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Return `mask` as an additive tensor of `dtype`: True -> 0, False -> -inf. After a write to the mask it is another tensor."""
        return self.once(("additive", mask, self._versions.get(mask), dtype), lambda: self._additive(mask, dtype))

    def _additive(self, mask: fx.Node, dtype: torch.dtype) -> fx.Node:
        if self.value(mask).dtype != torch.bool:
            return mask if self.value(mask).dtype == dtype else self.call(torch.Tensor.to, mask, dtype)
        zero = self.call(torch.zeros, (), dtype=dtype, device=self.value(mask).device)
        return self.call(torch.where, mask, zero, float("-inf"))


def _usable(value: Any) -> Any:
    """Return a fake value that an op may be tried on.

    The model may write to a base after it took views of the base by `chunk` or `unbind`. From then on autograd refuses every use of such
    a view's fake value, also a use that stands before the write in the graph. A value without that history has the same layout.
    """
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    try:
        _ = value.grad_fn
    except RuntimeError:
        with torch.no_grad():
            return value.detach().requires_grad_()
    return value
