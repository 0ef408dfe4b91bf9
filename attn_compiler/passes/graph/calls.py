"""Function and arguments of a Dynamo node. Models give arguments by position or by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import fx

#: the name of an argument in PyTorch's own functions -> all names by which they take it, NumPy's included
_NAMES: Mapping[str, tuple[str, ...]] = {"input": ("input", "self", "x", "a", "x1"), "dim": ("dim", "axis")}


def target_name(node: fx.Node) -> str:
    """Return the bare name of what a node calls: "linear" for F.linear, torch.linear, aten.linear.default."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket.__name__)
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def is_pytorchs(node: fx.Node) -> bool:
    """Return whether a node calls a method, or a function of PyTorch or Python: not another library's of the same name."""
    if node.op != "call_function":
        return node.op == "call_method"
    module = getattr(node.target, "__module__", None) or ""
    # torch.exp and its like belong to no module.
    is_builtin = getattr(torch, getattr(node.target, "__name__", ""), None) is node.target
    return is_builtin or module.split(".")[0] in ("torch", "_operator")


#: makes the context in which a pass rewrites one call; the context may catch exceptions
Trying = Callable[[fx.Node], contextlib.AbstractContextManager[object]]


def untried(_: fx.Node) -> contextlib.AbstractContextManager[object]:
    """Return a context that catches nothing."""
    return contextlib.nullcontext()


def argument(node: fx.Node, position: int, name: str) -> Any:
    """Return an argument of a Dynamo node, by whatever name it is given; None if it is not given."""
    if position < len(node.args):
        return node.args[position]
    return next((node.kwargs[n] for n in _NAMES.get(name, (name,)) if n in node.kwargs), None)


def run(node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
    """Run a call of a Dynamo node on other values of its inputs."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def reached(
    start: Iterable[fx.Node], further: Callable[[fx.Node], Iterable[fx.Node]] = attrgetter("all_input_nodes")
) -> Iterator[fx.Node]:
    """Yield the nodes that are reached from some, with these, each once. further: the next nodes of a node, asked after it was yielded."""
    seen, waiting = set[fx.Node](), list(start)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting.extend(further(node))
