"""What was read off a graph, evaluated at every index, beside what the function gives eagerly."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index
from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.recovering import reading
from tests.passes.compiling import mark, mirror_of
from tests.passes.mirror_values import MirrorValues

NAMES = ("b", "h", "q", "k")


@dataclass(frozen=True, kw_only=True)
class Read:
    """text: of the expression read for the output. loads: the tensors in it. equal: whether it is the output, at every index.

    An output that loads other tensors than inputs is not evaluated: never equal.
    """

    text: str
    loads: set[str]
    equal: bool


def read(function: Callable[..., torch.Tensor], *inputs: torch.Tensor, dynamic_sizes: tuple[int, ...] = ()) -> Read:
    """Read the function's result. Loads must be of its inputs, under the names of its parameters. Raises Unreadable."""
    given = dict(zip(inspect.signature(function).parameters, inputs, strict=True))
    wanted = function(*(tensor.clone() for tensor in inputs))
    mirror = mirror_of(function, *(mark(tensor.clone(), dynamic_sizes) for tensor in inputs))
    node, sizes = output_of(mirror), _sizes(mirror, given)
    reader = reading.of(mirror)
    names = NAMES[4 - wanted.dim() :]
    expression = reader.read(node, tuple(map(Index, names)))
    loads = {load.tensor for load in ix.loads(expression)}

    def element(name: str, at: tuple[int, ...]) -> Any:
        return given[name][at].item()

    equal = loads <= given.keys() and all(
        ix.evaluate(expression, dict(zip(names, at, strict=True)) | sizes, element) == pytest.approx(wanted[at].item())
        for at in itertools.product(*map(range, wanted.shape))
    )
    return Read(text=ix.text(expression), loads=loads, equal=equal)


def output_of(mirror: Mirror) -> fx.Node:
    """The one output."""
    output: Any = mirror.graph.output_node().args[0]
    return output[0] if isinstance(output, (list, tuple)) else output


def _sizes(mirror: Mirror, given: dict[str, torch.Tensor]) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in mirror.graph.nodes:
        dynamo = mirror.dynamo_node(node)
        name = dynamo.name.removeprefix("l_").rstrip("_") if dynamo is not None else ""
        if node.op == "placeholder" and name in given:
            shapes = zip(node.meta["val"].shape, given[name].shape, strict=True)
            found |= {str(axes.size_expr(s)): n for s, n in shapes if isinstance(s, torch.SymInt)}
    return found


# ---- with any loads ------------------------------------------------------------------------------------------------


def evaluated(
    function: Callable[..., torch.Tensor], *inputs: torch.Tensor, dynamic_sizes: tuple[int, ...] = ()
) -> Read:
    """Read the function's result, whatever it loads, on the values that its graph gives for these inputs. Raises Unreadable."""
    mirror = mirror_of(function, *(mark(t, dynamic_sizes) for t in inputs))
    node, reader = output_of(mirror), reading.of(mirror)
    rank = node.meta["val"].dim()
    expression = reader.read(node, tuple(map(Index, NAMES[4 - rank :])))
    run, sizes = _values(mirror, inputs)
    wanted = run.of_node[node]

    def load(name: str, at: tuple[int, ...]) -> Any:
        return run.held(reader.tensors[name])[at].item()

    equal = True
    for at in itertools.product(*map(range, wanted.shape)):
        numbers = dict(zip(NAMES[4 - rank :], at, strict=True)) | sizes
        found = ix.evaluate(expression, numbers, load)
        equal = equal and found == pytest.approx(wanted[at].item())
    return Read(text=ix.text(expression), loads=set(reader.tensors), equal=equal)


def _values(mirror: Mirror, inputs: tuple[torch.Tensor, ...]) -> tuple[MirrorValues, dict[str, int]]:
    """Every node's value, and every symbol's."""
    placeholders = [n for n in mirror.graph.nodes if n.op == "placeholder"]
    tensors = [n for n in placeholders if isinstance(n.meta.get("val"), torch.Tensor)]
    of_shape = {tuple(map(str, n.meta["val"].shape)): n for n in tensors}
    assert len(of_shape) == len(inputs), "inputs of these tests differ in shape"
    sizes: dict[str, int] = {}
    given: dict[fx.Node, Any] = {}
    for node, tensor in zip(_in_order(tensors, inputs), inputs, strict=True):
        given[node] = tensor.clone()
        sizes |= {str(axes.size_expr(s)): n for s, n in zip(node.meta["val"].shape, tensor.shape, strict=True)}
    arguments = [given.get(n, sizes.get(str(n.meta.get("val")))) for n in placeholders]
    interpreter = MirrorValues(mirror)
    interpreter.run(*arguments)
    return interpreter, {name: n for name, n in sizes.items() if not name.isdigit()}


def _in_order(nodes: list[fx.Node], inputs: tuple[torch.Tensor, ...]) -> list[fx.Node]:
    """The placeholder of each input: Dynamo orders them by first use. Told apart by their known sizes and dtype."""

    def fits(node: fx.Node, tensor: torch.Tensor) -> bool:
        value = node.meta["val"]
        hints = [s.node.hint if isinstance(s, torch.SymInt) else s for s in value.shape]
        return hints == list(tensor.shape) and value.dtype == tensor.dtype

    return [next(n for n in nodes if fits(n, tensor)) for tensor in inputs]


def joined(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The mask, in a graph that Dynamo has a reason to capture."""
    return mask & (x == 0) if mask.dtype == torch.bool else mask + x.to(mask.dtype)
