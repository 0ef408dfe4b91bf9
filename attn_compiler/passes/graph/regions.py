"""Autocast, grad mode and `sdpa_kernel` scopes of a Dynamo graph, read off the nodes that enter them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

_ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
_EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """The state in force at one node.

    autocast: arguments of the regions entered and not left, outermost first. kernels: those of PyTorch's kernels that an sdpa_kernel scope
    allows; None: all; empty where kernels were switched in another way. transforms: the number of torch.func's transforms around it (vmap,
    grad, jvp ...).
    """

    autocast: tuple[tuple[Any, ...], ...] = ()
    kernels: frozenset[str] | None = None
    transforms: int = 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Enter the same autocast regions, so that fake values get the dtypes that the model will see."""
        with contextlib.ExitStack() as stack:
            for args in self.autocast:
                stack.enter_context(torch.amp.autocast_mode.autocast(*args))
            yield


def has_autocast(graph: fx.Graph) -> bool:
    """Return whether a graph enters autocast anywhere."""
    return bool(graph.find_nodes(op="call_function", target=_ENTER_AUTOCAST, sort=False))


@contextlib.contextmanager
def without_autocast(graph: fx.Graph, region: Region) -> Iterator[None]:
    """Leave a region's autocast for the nodes inserted inside the block. The caller sets where they are inserted."""
    types = list(dict.fromkeys((device_type, dtype) for device_type, dtype, *_ in region.autocast))
    entered = [_without_value(graph, _ENTER_AUTOCAST, (*one, False, None)) for one in types]
    yield
    for node in reversed(entered):
        _without_value(graph, _EXIT_AUTOCAST, (node,))


def _without_value(graph: fx.Graph, function: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
    node = graph.call_function(function, args)
    node.meta["example_value"] = None
    return node


def by_node(graph: fx.Graph) -> dict[fx.Node, Region]:
    """Return the region of every node of a graph."""
    current = Region()
    regions: dict[fx.Node, Region] = {}
    for node in graph.nodes:
        current = _after(current, node)
        regions[node] = current
    return regions


def _after(region: Region, node: fx.Node) -> Region:
    if node.target is _ENTER_AUTOCAST:
        return dataclasses.replace(region, autocast=(*region.autocast, tuple(node.args)))
    if node.target is _EXIT_AUTOCAST:
        return dataclasses.replace(region, autocast=region.autocast[:-1])
    if _sets_sdpa_kernel(node):
        return dataclasses.replace(region, kernels=_kernels_left(node))
    return dataclasses.replace(region, transforms=region.transforms + _nesting(node)) if _nesting(node) else region


def _nesting(node: fx.Node) -> int:
    """Return 1 for a call that enters a transform of torch.func (`_vmap_increment_nesting`), -1 for one that leaves it, else 0."""
    name = getattr(node.target, "__name__", "")
    return int(name.endswith("_increment_nesting")) - int(name.endswith("_decrement_nesting"))


def _sets_sdpa_kernel(node: fx.Node) -> bool:
    """Return whether a call sets kernels. Dynamo writes an sdpa_kernel scope as two calls: one sets the scope's, one those of before."""
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and (
        "sdp" in name and ("set_" in name or "enable" in name or "_sdpa_kernel" in name)
    )


#: the names of PyTorch's kernels that a site may get
_ALL = frozenset({"FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"})


def _kernels_left(node: fx.Node) -> frozenset[str] | None:
    """Return the kernels that a call that sets kernels allows; None: all of them."""
    given = node.args[0] if node.args else None
    names = [x.args[0] for x in given if isinstance(x, fx.Node) and x.args] if isinstance(given, (list, tuple)) else []
    found = frozenset(name for name in names if isinstance(name, str))
    return None if found >= _ALL else found & _ALL
