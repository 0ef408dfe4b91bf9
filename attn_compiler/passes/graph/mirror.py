"""The canonical pre-dispatch ATen mirror of one Dynamo graph, with provenance: patterns are matched on it, and it is never compiled.

Dynamo's graph has many spellings of one computation (methods, functions, operators). The mirror has one ATen op for each, with bound
arguments and fake values, while SDPA, softmax, matmul, einsum and linear stay whole.

Higher-order and functorch nodes are opaque. Each result becomes an `opaque` call on the node's inputs, shaped like its example value and
in the memory of the input that it is a view of. An `effect` stands for the inputs that a body writes to, and for the inputs of a call
without a result. The axis that a vmap adds or removes is kept (vmap_axes). Autocast regions are entered while tracing, so that dtypes
are right. Dynamo's example values are the truth: where tracing gives another dtype, the mirror takes Dynamo's.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from attn_compiler.passes.graph import bodies, closed, fragments, mutation, vmap_axes
from attn_compiler.passes.graph.calls import reached
from attn_compiler.passes.graph.fragments import Fragments
from attn_compiler.passes.graph.vmap_axes import VmapAxis
from attn_compiler.torch_private import tracing as torch_tracing

_OPAQUE_MODULES = ("torch._functorch", "torch._C._functorch", "torch.autograd.function", "torch.nn.attention")

#: methods that turn an element into a number, for which Dynamo has a symbol and a fake tensor has none
_READS_NUMBERS = ("item", "tolist")

#: calls without a value that change only state in fragments' keys, or elements of tensors
_CHANGES_KNOWN_STATE = frozenset(
    {
        torch._C._set_grad_enabled,
        torch.amp.autocast_mode._enter_autocast,
        torch.amp.autocast_mode._exit_autocast,
        operator.setitem,
    }
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Origins:
    """The Dynamo nodes that a mirror's nodes come from, by node; arguments: by higher-order call of the Dynamo graph."""

    owners: dict[fx.Node, fx.Node]
    values: dict[fx.Node, fx.Node]
    arguments: dict[fx.Node, tuple[fx.Node | None, ...]]
    vmap_axes: dict[fx.Node, VmapAxis]


class Writers(NamedTuple):
    """The nodes that write into some memory, and the place of each in the order of the mirror."""

    nodes: list[fx.Node]
    places: list[int]


class Mirror:
    """The graph in ATen ops, beside the Dynamo graph that it was traced from.

    graph: the ATen graph; `meta["val"]` of each node is its fake value.
    writers: the nodes that write in place, each with the storages that it writes to.
    reshapers: those writers that change shape or strides.
    vmap_axes: the stand-ins of vmap's own calls, each with its axis.
    dynamo_node(n): the Dynamo node with the very value of mirror node n. None for a value in the middle of one Dynamo call. An in-place
        op returns the tensor that it wrote to.
    owner(n): the Dynamo node whose execution made n.
    order(n): the place of n in the mirror.
    live: the nodes that the graph's results, its writes and its opaque calls depend on.
    """

    def __init__(self, graph: fx.Graph, origins: Origins) -> None:
        self.graph = graph
        self._owners = origins.owners
        self._values = origins.values
        self._arguments = origins.arguments
        self.vmap_axes = origins.vmap_axes
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        self.writers = mutation.writers(graph)
        self.reshapers = mutation.reshapers(self.writers)
        self._writers_by_memory: dict[StorageWeakRef, list[fx.Node]] = {}
        for writer, written in self.writers:
            for storage in written:
                self._writers_by_memory.setdefault(storage, []).append(writer)
        self._writers_into: dict[fx.Node, Writers] = {}
        self._owned: dict[fx.Node, list[fx.Node]] = {}
        for node, owner in origins.owners.items():
            self._owned.setdefault(owner, []).append(node)
        roots = [n for n in graph.nodes if n.op == "output" or n.target is opaque]
        self.live = set(reached([*roots, *(writer for writer, _ in self.writers)]))

    def dynamo_node(self, node: fx.Node) -> fx.Node | None:
        while node not in self._values and (written := mutation.returned(node)) is not None:
            node = written
        return self._values.get(node)

    def owner(self, node: fx.Node) -> fx.Node | None:
        return self._owners.get(node)

    def first_name(self, node: fx.Node) -> fx.Node:
        """Return the node of a tensor before a chain of in-place ops wrote to it."""
        while (written := mutation.returned(node)) is not None and self.dynamo_node(written) is not None:
            node = written
        return node

    def owned(self, dynamo_node: fx.Node) -> list[fx.Node]:
        """Return the nodes that the execution of a Dynamo node made."""
        return self._owned.get(dynamo_node, [])

    def arguments(self, call: fx.Node) -> tuple[fx.Node | None, ...]:
        """Return the arguments of a higher-order call at that time: a node for each argument that is a tensor."""
        return self._arguments.get(call, ())

    def order(self, node: fx.Node) -> int:
        return self._order[node]

    def writers_into(self, tensor: fx.Node) -> Writers:
        """Return the nodes that write into the memory of a tensor, in order, each with its place in the order of the mirror."""
        if tensor not in self._writers_into:
            memory = mutation.storages(tensor)
            own = {writer for storage in memory for writer in self._writers_by_memory.get(storage, ())}
            nodes = sorted(own, key=self.order)
            self._writers_into[tensor] = Writers(nodes=nodes, places=list(map(self.order, nodes)))
        return self._writers_into[tensor]

    def computes_only(self, dynamo_node: fx.Node) -> bool:
        """Return whether a Dynamo node does nothing but compute its value: ATen ops that write nothing in place."""
        nodes = self.owned(dynamo_node)
        known = all(isinstance(n.target, torch._ops.OpOverload) or n.target is operator.getitem for n in nodes)
        return known and not any(map(mutation.writes, nodes))

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """Return the users of a node that are live: the graph's results, writes or opaque calls depend on them."""
        return [user for user in node.users if user in self.live]

    def constant(self, node: fx.Node) -> torch.Tensor | None:
        """Return the real tensor behind `torch.tensor(0.125)` and the like.

        An attribute of the model is none: it may change. An exported program has the constant as an input that holds it.
        """
        tensor = node.meta.get("constant")
        return tensor if isinstance(tensor, torch.Tensor) else None


def build(graph_module: fx.GraphModule, skipped: frozenset[fx.Node] = frozenset()) -> Mirror:
    """Trace the mirror of one Dynamo graph module (not of the bodies nested in it). skipped: nodes to treat as opaque."""
    inputs = graph_module.graph.find_nodes(op="placeholder")
    placeholders = closed.stand_ins([n.meta["example_value"] for n in inputs])
    tracer = _Tracing(graph_module, skipped)
    traced = torch_tracing.trace_pre_dispatch(tracer.run_all, placeholders, definitions=torch_tracing.definitions())
    return Mirror(traced.graph, tracer.finish(traced))


def opaque(*inputs: torch.Tensor) -> None:
    """Stand in the mirror for a call that is not looked into: it reads `inputs`, and may do anything with them."""
    raise NotImplementedError("a mirror is analysed, never run")


def is_opaque(node: fx.Node) -> bool:
    """Return whether tracing must not enter a node."""
    if node.op == "call_module" or isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    module = getattr(node.target, "__module__", "") or ""
    return node.op == "call_function" and module.startswith(_OPAQUE_MODULES)


class _Tracing(fx.Interpreter):
    """Runs the Dynamo graph under make_fx and records the Dynamo node of each ATen node."""

    def __init__(self, graph_module: fx.GraphModule, skipped: frozenset[fx.Node]) -> None:
        super().__init__(graph_module, garbage_collect_values=False)
        self._skipped = skipped
        self._owner_names: dict[str, fx.Node] = {}
        self._value_names: dict[str, fx.Node] = {}
        self._argument_names: dict[fx.Node, tuple[str | None, ...]] = {}
        self._vmaps = vmap_axes.Tracker()
        self._memory = vmap_axes.Memory()
        self._traced_so_far = 0
        self._regions: list[torch.amp.autocast_mode.autocast] = []
        self._entered: list[Any] = []
        self._fragments = Fragments(graph_module.graph)
        self._unknown_calls = 0

    def run_all(self, *args: Any) -> Any:
        try:
            return self.run(*args, enable_io_processing=False)
        finally:
            while self._regions:
                self._regions.pop().__exit__(None, None, None)

    def finish(self, traced: fx.GraphModule) -> Origins:
        nodes = {node.name: node for node in traced.graph.nodes}
        for node in nodes.values():
            if node.op == "get_attr":
                node.meta["constant"] = getattr(traced, str(node.target), None)
        values = {node: self._value_names[name] for name, node in nodes.items() if name in self._value_names}
        for node, owner in values.items():
            if node.op == "placeholder" and "constant" in owner.meta:
                node.meta["constant"] = owner.meta["constant"]
        owners = {node: self._owner_names[name] for name, node in nodes.items() if name in self._owner_names}
        axes = self._vmaps.axes()
        return Origins(
            owners=owners,
            values=values,
            arguments={
                call: tuple(nodes.get(name) if name is not None else None for name in names)
                for call, names in self._argument_names.items()
            },
            vmap_axes={n: axes[owner] for n, owner in owners.items() if owner in axes and n.target is opaque},
        )

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            return super().run_node(n)
        tracer = torch_tracing.current_tracer()
        with torch_tracing.unseen():
            call = self._call(n, tracer)
        if call is not None and call.fragment is not None:
            result, made = fragments.made_again(call, tracer)
        else:
            result = self._execute(n)
            count = len(tracer.graph.nodes) - self._traced_so_far
            made = list(itertools.islice(reversed(tracer.graph.nodes), count))[::-1]
        self._traced_so_far = len(tracer.graph.nodes)
        with torch_tracing.unseen():
            if call is not None and call.is_new:
                self._fragments.keep(call, result, made, tracer)
            result = self._truthful(n, result, tracer)
            for aten_node in made:
                self._owner_names[aten_node.name] = n
            self._remember(n, result, tracer)
        return result

    def _call(self, n: fx.Node, tracer: Any) -> fragments.NodeCall | None:
        """Look up the fragment of a node that is to be traced; None if the node can't be made again."""
        if self._vmaps.is_inside or n.op not in ("call_function", "call_method") or self._is_hidden(n):
            return None
        example = n.meta.get("example_value")
        if isinstance(example, (torch.Tensor, tuple, list)):
            state = (self._unknown_calls, *self._entered)
            return self._fragments.call(n, self.env, state, tracer)
        if example is None and n.target not in _CHANGES_KNOWN_STATE:
            self._unknown_calls += 1
        return None

    def _is_hidden(self, n: fx.Node) -> bool:
        return n in self._skipped or is_opaque(n) or n.target in _READS_NUMBERS or self._is_closed(n)

    def _execute(self, n: fx.Node) -> Any:
        if n.op == "get_attr":
            return self._attribute(n)
        if n.target is torch.amp.autocast_mode._enter_autocast:
            return self._enter(n)
        if n.target is torch.amp.autocast_mode._exit_autocast:
            self._entered.pop()
            return self._regions.pop().__exit__(None, None, None)
        if self._is_among_skipped(n):
            return n.meta["example_value"]
        hidden = self._is_hidden(n)
        if not hidden and self._vmaps.is_inside and vmap_axes.is_indexed_by_elements(n):
            x, index = self.fetch_args_kwargs_from_env(n)[0]
            found = vmap_axes.indexed(x, index)
            return found if found is not None else self._stand_in(n)
        return self._stand_in(n) if hidden else super().run_node(n)

    def _is_closed(self, n: fx.Node) -> bool:
        """Return whether a node is closed. Taking one of several results runs for real, whatever the result is."""
        if n.op == "placeholder" or not closed.is_closed(n):
            return False
        return n.target is not operator.getitem or not isinstance(self.env[n.all_input_nodes[0]], (tuple, list))

    def _is_among_skipped(self, n: fx.Node) -> bool:
        """Return whether a skipped node has only skipped neighbours, or inputs that only such nodes read: nobody needs its value."""
        return n in self._skipped and all(
            other in self._skipped or (other.op == "placeholder" and self._skipped.issuperset(other.users))
            for other in (*n.all_input_nodes, *n.users)
        )

    def _enter(self, n: fx.Node) -> None:
        arguments: Any = n.args
        region = torch.amp.autocast_mode.autocast(*arguments)
        region.__enter__()  # type: ignore[no-untyped-call]
        self._regions.append(region)
        self._entered.append(n.args)

    def _attribute(self, n: fx.Node) -> Any:
        attribute = self.fetch_attr(str(n.target))
        if not isinstance(attribute, torch.Tensor):
            return attribute
        tracer = torch_tracing.current_tracer()
        example = n.meta.get("example_value")
        fake = example if isinstance(example, torch.Tensor) else torch_tracing.current_fake(attribute)
        proxy = tracer.create_proxy("placeholder", f"attribute_{n.name}", (), {})
        return torch_tracing.track(closed.stand_in(fake), proxy, tracer)

    def _stand_in(self, n: fx.Node) -> Any:
        tracer = torch_tracing.current_tracer()
        traced = {i: node for i in n.all_input_nodes if (node := self._traced(i, tracer)) is not None}
        inputs = tuple(traced.values())
        value: Any = n.meta.get("example_value")
        if n in self._skipped and not closed.holds_closed(value):
            # A skipped node makes one new tensor, and writes nothing.
            torch_tracing.track_node(value, torch_tracing.add_node(tracer, opaque, inputs, {}, n.name), tracer)
            return value
        self._vmaps.see(n)
        if bodies.is_higher_order(n):
            given = [traced.get(x) if isinstance(x, fx.Node) else None for x in n.args]
            self._argument_names[n] = tuple(node.name if node is not None else None for node in given)
        flat, spec = pytree.tree_flatten(value)
        out = []
        for part in flat:
            x = part
            if isinstance(x, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
                node = torch_tracing.add_node(tracer, opaque, inputs, {}, n.name)
                x = self._in_its_memory(n, x)
                torch_tracing.track_node(x, node, tracer)
                closed.describe(node, part, self._given(n))
            out.append(x)
        written = self._written(n)
        effects = tuple(node for i, node in traced.items() if i in written)
        if effects:
            torch_tracing.add_node(tracer, mutation.effect, effects, {}, n.name)
        return pytree.tree_unflatten(out, spec)

    def _traced(self, n: fx.Node, tracer: Any) -> fx.Node | None:
        value = self.env[n]
        return torch_tracing.traced_node(value, tracer) if isinstance(value, torch.Tensor) else None

    def _written(self, n: fx.Node) -> set[fx.Node]:
        if bodies.is_higher_order(n):
            return bodies.written_by(n)
        if closed.reads_closed(n):
            return set(closed.written(n))
        return set(n.all_input_nodes) if n.meta.get("example_value") is None else set()

    def _in_its_memory(self, n: fx.Node, x: Any) -> Any:
        """Return the stand-in of an opaque call's result: in the memory of the input that it is a view of, else in its own.

        A tensor that only exists inside a transform of torch.func gets a plain one of its shape.
        """
        if closed.holds_closed(x):
            return torch_tracing.untraced(closed.token)
        if not isinstance(x, torch.Tensor):
            return x
        source = self.env[n.args[0]] if n.args and isinstance(n.args[0], fx.Node) else None
        view = self._memory.view(n, source, x) if isinstance(source, torch.Tensor) else None
        if view is not None:
            return view
        if not isinstance(x, FakeTensor):
            shape, stride, dtype, device = x.shape, x.stride(), x.dtype, x.device
            return torch_tracing.untraced(lambda: torch.empty_strided(shape, stride, dtype=dtype, device=device))
        return closed.in_memory_of(self._given(n), x)

    def _given(self, n: fx.Node) -> list[closed.Pair]:
        tracer = torch_tracing.current_tracer()
        return [
            pair for i in n.all_input_nodes for pair in closed.pairs(i.meta.get("example_value"), self.env[i], tracer)
        ]

    def _truthful(self, n: fx.Node, result: Any, tracer: Any) -> Any:
        example = n.meta.get("example_value")
        if not isinstance(result, torch.Tensor) or not isinstance(example, torch.Tensor):
            return result
        node = torch_tracing.traced_node(result, tracer)
        if n.op in ("placeholder", "get_attr") and node is not None:
            closed.describe(node, example, ())
        if result.dtype == example.dtype or closed.holds_closed(example):
            return result
        if node is None:
            return result
        retyped = torch_tracing.track(example, fx.Proxy(node, tracer), tracer)
        node.meta["val"] = retyped
        return retyped

    def _remember(self, n: fx.Node, result: Any, tracer: Any) -> None:
        if isinstance(result, (torch.Tensor, torch.SymFloat, torch.SymInt)):
            node = torch_tracing.traced_node(result, tracer)
            if node is not None:
                self._value_names.setdefault(node.name, n)
