"""Triton's interpreter does the same in half the time: what it works out again and again is kept.

A launch, and each call of a device function in it, puts the interpreter's functions in the place of all of `triton.language`'s, after a
look at every member. Here what is to be put there is found once, put there once a launch, and taken away at its end. Sums of integers
are not taken again in 64 bits to look for an overflow that nobody is told of: `InterpreterOptions.debug` is off. The dtypes of NumPy and
the shapes of tensors, each a table or a tuple made anew, are kept as well.

It holds for the releases whose sources it was written for (`KNOWN`); any other is left as it is, only slower.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

#: releases of Triton whose interpreter is this one
KNOWN = ("3.7",)

_Change = tuple[Any, str, Any, Any]  # object, attribute, what was there, what is there during a launch


def install() -> None:
    """In this process. Triton is imported, since its interpreter is a matter of its own modules."""
    if importlib.util.find_spec("triton") is None:
        return
    import triton

    if triton.__version__.startswith(KNOWN) and triton.knobs.runtime.interpret:
        from triton.runtime import interpreter

        _patch_once_a_launch(interpreter)
        _keep_dtypes_and_shapes(interpreter)
        builder = interpreter.interpreter_builder
        if not builder.options.debug:
            builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


class _Launch:
    """What is in the place of triton.language while kernels run. `restore` is called by the launch alone, at its end."""

    def __init__(self, interpreter: Any, patch: Callable[[Any], Any]) -> None:
        self._missing, self._patch = interpreter._MISSING, patch
        self._known: dict[tuple[frozenset[Any], ...], list[_Change]] = {}
        self._patched: tuple[frozenset[Any], ...] = ()
        self._now: list[_Change] = []

    def enter(self, modules: frozenset[Any], fn: Any) -> None:
        """With the modules of triton.language that a function sees. What was entered before stays."""
        if modules in self._patched:
            return
        self._patched = (*self._patched, modules)
        changes = self._known.get(self._patched)
        if changes is None:
            scope = self._patch(fn)
            changes = [(thing, name, before, getattr(thing, name)) for thing, name, before in scope._changes]
            self._known[self._patched] = changes
        else:
            for thing, name, _, now in changes:
                setattr(thing, name, now)
        self._now += changes

    def restore(self) -> None:
        for thing, name, before, _ in reversed(self._now):
            if before is not self._missing:
                setattr(thing, name, before)
            elif name in vars(thing):
                delattr(thing, name)
        self._now, self._patched = [], ()


def _patch_once_a_launch(interpreter: Any) -> None:
    tl, patch, run = interpreter.tl, interpreter._patch_lang, interpreter.GridExecutor.__call__
    launch, depth = _Launch(interpreter, patch), 0

    @functools.cache
    def seen_by(fn: Any) -> frozenset[Any]:
        return frozenset(value for value in fn.__globals__.values() if value is tl or value is tl.core)

    def patch_lang(fn: Any) -> Any:
        """A function that is called outside a launch is none of ours."""
        if depth != 1 or not seen_by(fn):
            return patch(fn)
        launch.enter(seen_by(fn), fn)
        return launch

    @functools.wraps(run)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            return run(self, *args, **kwargs)
        finally:
            depth -= 1

    interpreter._patch_lang = patch_lang
    interpreter.GridExecutor.__call__ = call


def _keep_dtypes_and_shapes(interpreter: Any) -> None:
    core, np_dtype = interpreter.tl.core, interpreter._get_np_dtype
    dtypes: dict[str, Any] = {}

    def get_np_dtype(dtype: Any) -> Any:
        if type(dtype) is not core.dtype:
            return np_dtype(dtype)
        found = dtypes.get(dtype.name)
        if found is None:
            found = dtypes[dtype.name] = np_dtype(dtype)
        return found

    @functools.cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])

    @functools.wraps(core.tensor.__init__)
    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shape_of(tuple(type.shape.values) if type.is_block() else ())

    blocks: dict[tuple[str, tuple[int, ...]], tuple[Any, Any, str]] = {}
    make_block = core.block_type.__init__

    @functools.wraps(make_block)
    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape.values if type(shape) is core.tuple else shape)
        if not all(type(size) is int for size in sizes):
            make_block(self, element_ty, shape)
            return
        found = blocks.get((element_ty.name, sizes))
        if found is None:
            make_block(self, element_ty, shape)
            blocks[element_ty.name, sizes] = self.shape, self.numel, self.name
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = found

    semantic = type(interpreter.interpreter_semantic)
    broadcast = semantic.broadcast_impl_value

    @functools.wraps(broadcast)
    def broadcast_value(self: Any, lhs: Any, rhs: Any) -> Any:
        mine, other = lhs.type, rhs.type
        if mine.is_block() and other.is_block() and mine.shape.values == other.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_value
    interpreter._get_np_dtype = get_np_dtype
    core.tensor.__init__ = init
    core.block_type.__init__ = block
