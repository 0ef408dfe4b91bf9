"""Private PyTorch API of a graph with further inputs: a size without Dynamo's guards, its own guards, and later compilations."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._guards import CompileContext, TracingContext, compile_context, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from attn_compiler.torch_private import compat as torch_compat

CompiledFn = Callable[..., Any]


def own_size(mode: FakeTensorMode, *, hint: int, most: int | None) -> torch.SymInt:
    """Make a size of at least 2 that is no size of Dynamo's inputs. most: None is no limit.

    hint: an example value, which decides choices. A size without a hint ("unbacked") won't do: Inductor fails on those in places, also in
    backwards. So it may get guards, which only we check (`taken_guards`).
    """
    env = _env(mode)
    source = ConstantSource(f"unpadded_tokens_{len(env.var_to_range)}")
    symbol = env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    if most is not None:
        env.constrain_symbol_range(symbol, 2, most)
    size = env.create_symintnode(symbol, hint=hint, source=source)
    if not isinstance(size, torch.SymInt):
        raise TypeError(f"the size of packed tokens became the number {size}")
    return size


def _env(mode: FakeTensorMode) -> ShapeEnv:
    if mode.shape_env is None:
        raise ValueError("without a shape environment all sizes are known")
    return mode.shape_env


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph over the same parameters, for a compiler to own."""
    return with_graph(gm, torch_compat.copied_graph(gm.graph))


def with_graph(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """Make a module of another graph over the same parameters. AOTAutograd knows the inputs with fixed addresses: CUDA graphs copy the
    others."""
    twin = copy.copy(gm)
    twin.graph = graph
    sources = getattr(gm, "_param_name_to_source", None)
    if sources is not None:
        # A copy, since one module's buffers are added to it.
        vars(twin)["_param_name_to_source"] = dict(sources)
    return twin


def mark_own_input(placeholder: fx.Node) -> None:
    """Mark an input of Dynamo's graph as absent from the user's code: AOTAutograd asks each for its source."""
    placeholder._dynamo_source = None


@dataclass(frozen=True, kw_only=True)
class Guards:
    """Guards of compiled code on sizes. fixed: the number that the size was fixed to, if it was. places: the input and the axis of each
    other symbol."""

    size: sympy.Symbol
    asked: tuple[sympy.Basic, ...]
    fixed: int | None
    places: Mapping[sympy.Symbol, tuple[int, int]]

    def hold(self, number: int, args: Sequence[Any]) -> bool:
        """Return True if the code may serve this size, with these inputs."""
        if self.fixed is not None:
            return number == self.fixed
        values = {symbol: args[i].shape[axis] for symbol, (i, axis) in self.places.items()}
        return all(guard.xreplace({self.size: sympy.Integer(number), **values}) == sympy.true for guard in self.asked)


def forget_guards(inputs: Sequence[Any]) -> None:
    """Remove the guards on our own sizes, for a graph that was given up. inputs: fake ones that have such sizes, or are them."""
    for size in (size for x in inputs for size in ([x] if isinstance(x, torch.SymInt) else _sizes(x))):
        sources = size.node.shape_env.var_to_sources.get(size.node._expr, ())
        if any(isinstance(source, ConstantSource) for source in sources):
            _taken(size.node.shape_env, size.node._expr)


def _sizes(x: torch.Tensor) -> list[torch.SymInt]:
    shape: tuple[int | torch.SymInt, ...] = x.shape
    return [size for size in shape if isinstance(size, torch.SymInt)]


def _taken(env: ShapeEnv, symbol: sympy.Symbol) -> tuple[sympy.Basic, ...]:
    """Remove the guards on a symbol, and return them."""
    asked = tuple(guard.expr for guard in env.guards if symbol in guard.expr.free_symbols)
    env.guards[:] = [guard for guard in env.guards if symbol not in guard.expr.free_symbols]
    return asked


def taken_guards(size: torch.SymInt, inputs: Sequence[Any]) -> Guards:
    """Remove and return the guards on a size of ours: Dynamo has no source to check them. inputs: fake ones. Raises ValueError if a guard
    also has a symbol that is no size of the inputs."""
    env, symbol = size.node.shape_env, size.node._expr
    asked = _taken(env, symbol)
    found = env.replace(symbol)
    if found != symbol and not found.is_Integer:
        raise ValueError(f"the number of packed tokens was found to be {found}")
    others = {other for guard in asked for other in guard.free_symbols} - {symbol}
    places: dict[sympy.Symbol, tuple[int, int]] = {}
    for i, x in enumerate(inputs):
        shape: tuple[int | torch.SymInt, ...] = x.shape if isinstance(x, torch.Tensor) else ()
        for axis, length in enumerate(shape):
            if isinstance(length, torch.SymInt) and length.node.expr in others:
                places[length.node.expr] = (i, axis)
    if others - places.keys():
        raise ValueError(f"a guard of packed tokens asks for {sorted(map(str, others - places.keys()))}")
    return Guards(size=symbol, asked=asked, fixed=int(found) if found.is_Integer else None, places=places)


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """The current compilation, to be entered again when it is over: as AOTAutograd enters it to compile a backward."""

    context: TracingContext | None
    id: CompileContext | None

    @staticmethod
    def current() -> Compilation:
        # PyTorch calls the context with the compilation's number an id.
        return Compilation(context=TracingContext.try_get(), id=CompileContext.try_get())

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Enter the compilation. Raises GuardedError for guards that can't be checked any more."""
        with contextlib.ExitStack() as stack:
            if self.id is not None:
                stack.enter_context(compile_context(self.id))
            if self.context is not None:
                stack.enter_context(tracing(self.context))
            mode = None if self.context is None else self.context.fake_mode
            env = None if mode is None else mode.shape_env
            known = 0 if env is None else len(env.guards)
            yield
            if env is not None and len(env.guards) > known:
                raise GuardedError(f"{env.guards[known:]}")


class GuardedError(Exception):
    """Code that was compiled later may only serve some sizes. Internal."""
