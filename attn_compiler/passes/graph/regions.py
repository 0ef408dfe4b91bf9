"""What is switched on where in a Dynamo graph: autocast, grad mode and `sdpa_kernel` scopes, read off the nodes that enter them."""

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

    autocast: arguments of the regions entered and not left, outermost first. kernels: of PyTorch's, those that an sdpa_kernel scope leaves;
    None: all; none at all where kernels were switched in another way. transforms: how many of torch.func's (vmap, grad, jvp ...) are
    around it.
    """

    autocast: tuple[tuple[Any, ...], ...] = ()
    kernels: frozenset[str] | None = None
    transforms: int = 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Enter the same autocast regions for real, so that fake values come out in the dtypes that the model will see."""
        with contextlib.ExitStack() as stack:
            for args in self.autocast:
                stack.enter_context(torch.amp.autocast_mode.autocast(*args))
            yield


def has_autocast(graph: fx.Graph) -> bool:
    """Whether a graph enters autocast anywhere."""
    return bool(graph.find_nodes(op="call_function", target=_ENTER_AUTOCAST, sort=False))


@contextlib.contextmanager
def left(graph: fx.Graph, region: Region) -> Iterator[None]:
    """What is inserted inside runs without the autocast of a region. The caller sets where it is inserted."""
    types = list(dict.fromkeys((device_type, dtype) for device_type, dtype, *_ in region.autocast))
    entered = [_without_value(graph, _ENTER_AUTOCAST, (*one, False, None)) for one in types]
    yield
    for node in reversed(entered):
        _without_value(graph, _EXIT_AUTOCAST, (node,))


def _without_value(graph: fx.Graph, function: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
    node = graph.call_function(function, args)
    node.meta["example_value"] = None
    return node


def of(graph: fx.Graph) -> dict[fx.Node, Region]:
    """The region of every node of a graph."""
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
    """1 for a call that enters a transform of torch.func (`_vmap_increment_nesting`), -1 for one that leaves it, else 0."""
    name = getattr(node.target, "__name__", "")
    return int(name.endswith("_increment_nesting")) - int(name.endswith("_decrement_nesting"))


def _sets_sdpa_kernel(node: fx.Node) -> bool:
    """Dynamo writes an sdpa_kernel scope as two calls: one sets the scope's kernels, and one those of before."""
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and (
        "sdp" in name and ("set_" in name or "enable" in name or "_sdpa_kernel" in name)
    )


#: the names of PyTorch's kernels that a site may get
_ALL = frozenset({"FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"})


def _kernels_left(node: fx.Node) -> frozenset[str] | None:
    """What a call that sets kernels leaves; None: all of them."""
    given = node.args[0] if node.args else None
    names = [x.args[0] for x in given if isinstance(x, fx.Node) and x.args] if isinstance(given, (list, tuple)) else []
    found = frozenset(name for name in names if isinstance(name, str))
    return None if found >= _ALL else found & _ALL
