"""Private PyTorch API of undoing changes of Dynamo's graph: nodes of a failed attempt, and all changes of a compiler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import fx
from torch._guards import TracingContext

from attn_compiler.torch_private import compat as torch_compat

_CONTAINERS = ("_parameters", "_buffers", "_modules")
#: caches of traced invoke_subgraph bodies by name; a restored graph may have another body under that name
_TRACED_BODIES = ("autograd_cache", "proxy_dispatch_cache", "lazy_bwd_cache", "effects_cache")


class Snapshot:
    """Dynamo's graph with all nested graphs, as they are now: `restore` undoes all changes."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._states = {
            module: (torch_compat.copied_graph(module.graph), _attributes(module))
            for module in torch_compat.graph_modules(gm)
        }

    def graph(self, module: fx.GraphModule) -> fx.Graph:
        """Return the copy of one module's graph."""
        return self._states[module][0]

    def restore(self) -> None:
        """Restore the same module objects in place. To be called once, since it gives the copied graphs away."""
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
            # Not every release has all of these caches.
            getattr(cache, name, {}).clear()


def is_erased(node: fx.Node) -> bool:
    """Return True if a node is in no graph any more."""
    return bool(node._erased)


@contextlib.contextmanager
def taken_back_on_error(gm: fx.GraphModule) -> Iterator[None]:
    """Erase nodes of the module's own graph that the block made if it raises. Other changes stay."""
    made: list[fx.Node] = []
    note = made.append
    gm._register_create_node_hook(note)
    try:
        yield
    except BaseException:
        # Users of a node come after it.
        for node in reversed(made):
            if node.graph is gm.graph and not is_erased(node):
                gm.graph.erase_node(node)
        raise
    finally:
        gm._unregister_create_node_hook(note)
