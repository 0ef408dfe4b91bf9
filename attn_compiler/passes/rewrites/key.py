"""The key of a rewrite: everything that the passes can read.

The parts of the key:

- the nodes of the graph and of its bodies: names, functions, arguments, order. A function has a name that nothing else has
  (targets.py). So other libraries' functions, which may change while their names stay, have no key. Other libraries' ops have name and
  schema, except those that tracing looks into.
- Dynamo's values: dtype, device, shape, strides, offset, gradient, leaf or view, inference, parameter; which are one object, which share
  memory, how large that memory is; numbers that fake tensors know (values.py). Tensors that wrap others have no key.
- symbolic sizes, and all that is known of them, except their values in this call (sizes.py).
- attributes: the metadata of tensors, and the numbers of small ones. Passes take no number from larger ones.
- the origin of nodes: module paths and stack traces, which reports and notes quote.
- what is known of inputs that other graphs made, and what those write to (passes/recovering/borders.py gives it).
- options that passes read, this package's sources and version, machines (`Target`), and PyTorch's state (torch_caches.py).

Environment variables are read by `Target` and by nobody else. Passes read no time, no random number, no address and no other tensor.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.options import cache
from attn_compiler.options.options import Options
from attn_compiler.passes.rewrites import arguments, targets
from attn_compiler.passes.rewrites.refusing import Unkeyed
from attn_compiler.passes.rewrites.values import GraphValues, numbers_of
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import caches as torch_caches, compat as torch_compat

#: the most numbers of an attribute that a key holds
_MOST_NUMBERS = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Module:
    """One graph as Dynamo made it: its nodes in order, the arguments of each as data, and its values."""

    graph_module: fx.GraphModule
    nodes: tuple[fx.Node, ...]
    given: tuple[Any, ...]
    values: tuple[Any, ...]
    attributes: frozenset[str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Keyed:
    """A graph with its bodies, before anything of it is rewritten. text: the key."""

    text: str
    modules: tuple[Module, ...]
    values: GraphValues


def make_key(gm: fx.GraphModule, options: Options, known: Any) -> Keyed:
    """Make the key of a graph. known: further knowledge of the passes about the graph, as plain data. Raises Unkeyed."""
    targets.require_untouched()
    devices = torch_compat.graph_devices(gm)
    machines = {Target.current(str(device)) for device in devices}
    digest = _Digest()
    digest.add((cache.cache_key(options, machines), options.strict, torch_caches.state(devices), known))
    values = GraphValues()
    found = list(torch_compat.graph_modules(gm))
    places = {module: place for place, module in enumerate(found)}
    modules = tuple(_module(module, places, values, digest) for module in found)
    digest.add((values.sizes.known(), values.sizes.asked()))
    return Keyed(text=digest.text, modules=modules, values=values)


class _Digest:
    """A hash of data. Long texts that are repeated are hashed once."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._texts: dict[str, int] = {}

    def add(self, data: Any) -> None:
        self._hash.update(json.dumps(data, separators=(",", ":")).encode())
        self._hash.update(b"\n")

    def place(self, text: str) -> int:
        """Return a number that stands for a text."""
        known = self._texts.get(text)
        if known is None:
            known = self._texts[text] = len(self._texts)
            self.add(text)
        return known

    @property
    def text(self) -> str:
        return self._hash.hexdigest()


def _module(gm: fx.GraphModule, places: dict[fx.GraphModule, int], values: GraphValues, digest: _Digest) -> Module:
    nodes = tuple(gm.graph.nodes)
    numbers = {node: number for number, node in enumerate(nodes)}
    given, held = [], []
    digest.add(("graph", len(nodes)))
    for node in nodes:
        data = given_data(node, numbers)
        value = node.meta.get("example_value")
        attribute = _attribute_data(gm, str(node.target), places) if node.op == "get_attr" else None
        stack = node.meta.get("nn_module_stack") or {}
        origin = [str(path) for path, _ in stack.values()], digest.place(node.meta.get("stack_trace") or "")
        said = "example_value" in node.meta, values.data_of(value)
        digest.add((node.op, node.name, targets.name_of(node), data, said, attribute, origin))
        given.append(data)
        held.append(value)
    return Module(
        graph_module=gm,
        nodes=nodes,
        given=tuple(given),
        values=tuple(held),
        attributes=attribute_names(gm),
    )


def given_data(node: fx.Node, numbers: dict[fx.Node, int]) -> Any:
    """Return the arguments of a node as data. Raises Unkeyed."""
    return arguments.data_of((node.args, dict(node.kwargs)), numbers.__getitem__)


def attribute_names(gm: fx.GraphModule) -> frozenset[str]:
    """Return the names of the tensors and modules that a graph module holds."""
    return frozenset((*gm._parameters, *gm._buffers, *gm._modules))


def _attribute_data(gm: fx.GraphModule, path: str, places: dict[fx.GraphModule, int]) -> Any:
    found: Any = gm
    for step in path.split("."):
        found = getattr(found, step)
    if isinstance(found, fx.GraphModule):
        return "body", places[found]
    if not isinstance(found, torch.Tensor):
        raise Unkeyed(f"the graph reads {path}, which is {type(found).__module__}.{type(found).__qualname__}")
    if type(found) not in (torch.Tensor, torch.nn.Parameter) or found.layout is not torch.strided:
        raise Unkeyed(f"the graph reads {path}, which is {type(found).__qualname__}")
    sizes = tuple(found.shape), tuple(found.stride()), found.storage_offset()
    numbers = numbers_of(found) if found.numel() <= _MOST_NUMBERS else None
    device = arguments.device_data(found.device)
    return str(found.dtype), device, sizes, found.requires_grad, found.is_inference(), numbers
