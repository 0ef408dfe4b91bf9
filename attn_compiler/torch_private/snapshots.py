"""Private PyTorch API of taking back what was done to Dynamo's graph: nodes that an attempt made, and all that a compiler changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import fx
from torch._guards import TracingContext

from attn_compiler.torch_private import compat as torch_compat

_CONTAINERS = ("_parameters", "_buffers", "_modules")
#: what tracing a body of invoke_subgraph leaves for the next one of the same name; the name would stand for another body
_TRACED_BODIES = ("autograd_cache", "proxy_dispatch_cache", "lazy_bwd_cache", "effects_cache")


class Snapshot:
    """Dynamo's graph with all graphs nested in it, as they are now: `restore` makes them so again, whatever was done to them."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._states = {
            module: (torch_compat.copied_graph(module.graph), _attributes(module))
            for module in torch_compat.graph_modules(gm)
        }

    def graph(self, module: fx.GraphModule) -> fx.Graph:
        """The copy of one module's graph."""
        return self._states[module][0]

    def restore(self) -> None:
        """In place: the modules are the same objects. To be called once, for the graphs are given away with it."""
        for module, (graph, attributes) in self._states.items():
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module.graph = graph
        _forget_traced_bodies()


def _attributes(module: fx.GraphModule) -> dict[str, Any]:
    held = dict(module.__dict__)
    return held | {name: dict(held[name]) for name in (*_CONTAINERS, "meta") if name in held}


def _forget_traced_bodies() -> None:
    context = TracingContext.try_get()
    caches = {} if context is None else context.hop_dispatch_set_cache.hop_cache_map
    for cache in caches.values():
        for name in _TRACED_BODIES:
            # Not every release has all of them.
            getattr(cache, name, {}).clear()


def is_erased(node: fx.Node) -> bool:
    """Whether a node is in no graph any more."""
    return bool(node._erased)


@contextlib.contextmanager
def taken_back_on_error(gm: fx.GraphModule) -> Iterator[None]:
    """If the block raises, the nodes that it made in the module's own graph are erased again. What else it changed stays."""
    made: list[fx.Node] = []
    note = made.append
    gm._register_create_node_hook(note)
    try:
        yield
    except BaseException:
        # What reads a node was made after it.
        for node in reversed(made):
            if node.graph is gm.graph and not is_erased(node):
                gm.graph.erase_node(node)
        raise
    finally:
        gm._unregister_create_node_hook(note)
