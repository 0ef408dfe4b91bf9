"""What was read off a graph, evaluated at every index, beside what the function gives eagerly."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index
from attn_compiler.passes import axes, reading
from tests.passes.compiling import mark, mirror_of

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
    output = next(n for n in mirror.graph.nodes if n.op == "output").args[0]
    node = output[0] if isinstance(output, (list, tuple)) else output
    sizes = _sizes(mirror, given)
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


def _sizes(mirror: Any, given: dict[str, torch.Tensor]) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in mirror.graph.nodes:
        dynamo = mirror.dynamo_node(node)
        name = dynamo.name.removeprefix("l_").rstrip("_") if dynamo is not None else ""
        if node.op == "placeholder" and name in given:
            shapes = zip(node.meta["val"].shape, given[name].shape, strict=True)
            found |= {str(axes.size_expr(s)): n for s, n in shapes if isinstance(s, torch.SymInt)}
    return found
