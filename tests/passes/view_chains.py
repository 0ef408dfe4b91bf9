"""Random chains of view ops, for tests that follow axes through them. Every tensor's elements are distinct numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from attn_compiler.passes.graph import axes, views
from attn_compiler.passes.graph.axes import Dims

View = Callable[[torch.Tensor], torch.Tensor]
_MOST_ELEMENTS = 4096


@dataclass(frozen=True, kw_only=True)
class Chain:
    """shape: of the root. steps: (words, function) each; words so that a failing example reads itself."""

    shape: tuple[int, ...]
    steps: tuple[tuple[str, View], ...]

    def root(self) -> torch.Tensor:
        return torch.arange(math.prod(self.shape)).reshape(self.shape)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for _, step in self.steps:
            x = step(x)
        return x

    def __repr__(self) -> str:
        return f"{self.shape}: {'; '.join(words for words, _ in self.steps)}"


def traced(function: View, x: torch.Tensor) -> list[fx.Node]:
    """The ATen nodes of a chain, with fake values, the root's placeholder first."""
    graph = make_fx(lambda y: function(y), pre_dispatch=True, tracing_mode="fake")(x).graph
    return [node for node in graph.nodes if node.op != "output"]


def followed(function: View, x: torch.Tensor) -> tuple[Dims, Dims]:
    """(dimensions of the root, dimensions of the result) in shared atoms. Raises AxisError."""
    root, *nodes = traced(function, x)
    root_dims = dims = axes.fresh(axes.shape_exprs(views.value(root)))
    for node in nodes:
        dims = views.forward(node, dims)
    return root_dims, dims


# ---- strategies ---------------------------------------------------------------------------------------------------

shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4).map(tuple)


@st.composite
def chains(draw: st.DrawFn, *, repeats: bool = True) -> Chain:
    """Up to six steps; repeats: expand, repeat and repeat_interleave may be among them."""
    shape = draw(shapes)
    steps: list[tuple[str, View]] = []
    x = torch.empty(shape)
    for _ in range(draw(st.integers(1, 6))):
        make = draw(st.sampled_from(_MOVES + (_REPEATS if repeats else ())))
        step = make(draw, tuple(x.shape))
        if step is not None and step[1](x).numel() <= _MOST_ELEMENTS:
            steps.append(step)
            x = step[1](x)
    return Chain(shape=shape, steps=tuple(steps))


Step = tuple[str, View] | None
Shape = tuple[int, ...]


def _reshape(draw: st.DrawFn, shape: Shape) -> Step:
    sizes = draw(factors(math.prod(shape)))
    return f"reshape{sizes}", lambda x: x.reshape(sizes)


@st.composite
def factors(draw: st.DrawFn, number: int) -> Shape:
    """A shape of that many elements."""
    sizes = []
    while number > 1 and len(sizes) < 5:
        size = draw(st.sampled_from([d for d in range(1, number + 1) if number % d == 0]))
        sizes.append(size)
        number //= size
    return (*sizes, number)


def _flatten(draw: st.DrawFn, shape: Shape) -> Step:
    if not shape:
        return None
    first = draw(st.integers(0, len(shape) - 1))
    last = draw(st.integers(first, len(shape) - 1))
    return f"flatten({first}, {last})", lambda x: x.flatten(first, last)


def _unflatten(draw: st.DrawFn, shape: Shape) -> Step:
    if not shape:
        return None
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    outer = draw(st.sampled_from([d for d in range(1, shape[dim] + 1) if shape[dim] % d == 0]))
    return f"unflatten({dim}, ({outer}, -1))", lambda x: x.unflatten(dim, (outer, -1))


def _permute(draw: st.DrawFn, shape: Shape) -> Step:
    order = tuple(draw(st.permutations(range(len(shape)))))
    return f"permute{order}", lambda x: x.permute(order)


def _transpose(draw: st.DrawFn, shape: Shape) -> Step:
    if not shape:
        return None
    dims = st.integers(-len(shape), len(shape) - 1)
    i, j = draw(dims), draw(dims)
    return f"transpose({i}, {j})", lambda x: x.transpose(i, j)


def _movedim(draw: st.DrawFn, shape: Shape) -> Step:
    if len(shape) < 2:
        return None
    source = tuple(draw(st.permutations(range(len(shape))))[:2])
    target = tuple(draw(st.permutations(range(len(shape))))[:2])
    return f"movedim({source}, {target})", lambda x: x.movedim(source, target)


def _moveaxis(draw: st.DrawFn, shape: Shape) -> Step:
    if not shape:
        return None
    dims = st.integers(-len(shape), len(shape) - 1)
    source, target = draw(dims), draw(dims)
    return f"moveaxis({source}, {target})", lambda x: x.moveaxis(source, target)


def _ravel(draw: st.DrawFn, shape: Shape) -> Step:
    return "ravel()", lambda x: x.ravel()


def _mt(draw: st.DrawFn, shape: Shape) -> Step:
    return ("mT", lambda x: x.mT) if len(shape) >= 2 else None


def _unsqueeze(draw: st.DrawFn, shape: Shape) -> Step:
    dim = draw(st.integers(-len(shape) - 1, len(shape)))
    return f"unsqueeze({dim})", lambda x: x.unsqueeze(dim)


def _squeeze(draw: st.DrawFn, shape: Shape) -> Step:
    if not shape or draw(st.booleans()):
        return "squeeze()", lambda x: x.squeeze()
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    return f"squeeze({dim})", lambda x: x.squeeze(dim)


def _clone(draw: st.DrawFn, shape: Shape) -> Step:
    return "contiguous().clone()", lambda x: x.contiguous().clone()


def _expand(draw: st.DrawFn, shape: Shape) -> Step:
    leading = draw(st.lists(st.sampled_from([1, 2, 3]), max_size=1))
    sizes = (*leading, *(draw(st.sampled_from([1, 2, 3])) if s == 1 else s for s in shape))
    return f"expand{sizes}", lambda x: x.expand(sizes)


def _repeat_interleave(draw: st.DrawFn, shape: Shape) -> Step:
    if not shape:
        return None
    times, dim = draw(st.integers(1, 3)), draw(st.integers(-len(shape), len(shape) - 1))
    return f"repeat_interleave({times}, {dim})", lambda x: x.repeat_interleave(times, dim)


def _repeat(draw: st.DrawFn, shape: Shape) -> Step:
    leading = draw(st.integers(0, 1))
    times = tuple(draw(st.sampled_from([1, 1, 2])) for _ in range(len(shape) + leading))
    return f"repeat{times}", lambda x: x.repeat(times)


Make = Callable[[Any, Shape], Step]
_MOVES: tuple[Make, ...] = (
    _reshape,
    _flatten,
    _unflatten,
    _permute,
    _transpose,
    _movedim,
    _moveaxis,
    _ravel,
    _mt,
    _unsqueeze,
    _squeeze,
    _clone,
)
_REPEATS: tuple[Make, ...] = (_expand, _repeat_interleave, _repeat)
