"""Triton's interpreter does the same in half the time: what it works out again and again is kept.

A launch, and each call of a device function in it, puts the interpreter's functions in the place of all of `triton.language`'s, after a
look at every member. Here what is to be put there is found once, put there once a launch, and taken away at its end. Sums of integers
are not taken again in 64 bits to look for an overflow that nobody is told of: `InterpreterOptions.debug` is off. The dtypes of NumPy and
the shapes of tensors, each a table or a tuple made anew, are kept as well. Operands of one type are not looked at for a common one.

It holds for the releases whose sources it was written for (`KNOWN`); any other is left as it is, only slower.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import numpy as np

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
        _make_handles_at_once(interpreter)
        _take_operands_of_one_type_as_they_are(interpreter)
        builder = interpreter.interpreter_builder
        if not builder.options.debug:
            builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


class _Launch:
    """What is in the place of triton.language while kernels run. `restore` is called by the launch alone, at its end."""

    def __init__(self, interpreter: Any, patch: Callable[[Any], Any]) -> None:
        self._missing, self._patch = interpreter._MISSING, patch
        self._semantic = interpreter.interpreter_semantic
        self._builtin = interpreter.tl.core.builtin(lambda: None).__code__
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
            changes = [(thing, name, before, self._direct(vars(thing)[name])) for thing, name, before in scope._changes]
            for thing, name, _, now in changes:
                setattr(thing, name, now)
            self._known[self._patched] = changes
        else:
            for thing, name, _, now in changes:
                setattr(thing, name, now)
        self._now += changes

    def _direct(self, function: Any) -> Any:
        """Calls one of Triton's builtins with the interpreter's semantic, without a copy of its keywords and a second function."""
        member = (getattr(function, "__kwdefaults__", None) or {}).get("member")
        if member is None:
            return function
        call, semantic = member.__wrapped__ if member.__code__ is self._builtin else member, self._semantic

        def direct(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return call(*args, **kwargs)

        return direct

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

    semantic, handle = type(interpreter.interpreter_semantic), interpreter.TensorHandle
    broadcast = semantic.broadcast_impl_value

    @functools.cache
    def joint(mine: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...] | None:
        """None: Triton puts dimensions in front, or says what does not fit."""
        if len(mine) != len(other) or any(a != b and 1 not in (a, b) for a, b in zip(mine, other, strict=True)):
            return None
        return tuple(b if a == 1 else a for a, b in zip(mine, other, strict=True))

    def spread(x: Any, shape: tuple[int, ...]) -> Any:
        made = handle(np.broadcast_to(x.handle.data, shape), x.handle.dtype.scalar)
        return core.tensor(made, core.block_type(x.dtype, list(shape)))

    @functools.wraps(broadcast)
    def broadcast_value(self: Any, lhs: Any, rhs: Any) -> Any:
        mine, other = lhs.type, rhs.type
        if mine.is_block() and other.is_block():
            left, right = tuple(mine.shape.values), tuple(other.shape.values)
            if left == right:
                return lhs, rhs
            shape = joint(left, right)
            if shape is not None:
                return lhs if shape == left else spread(lhs, shape), rhs if shape == right else spread(rhs, shape)
        return broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_value
    unwrap = core._unwrap_if_constexpr

    @functools.wraps(unwrap)
    def unwrap_if_constexpr(x: Any) -> Any:
        kind = type(x)
        if kind is core.tensor or kind is int:
            return x
        return x.value if kind is core.constexpr else unwrap(x)

    core._unwrap_if_constexpr = unwrap_if_constexpr
    interpreter._get_np_dtype = get_np_dtype
    core.tensor.__init__ = init
    core.block_type.__init__ = block


def _make_handles_at_once(interpreter: Any) -> None:
    """What fits a dtype is remembered: an array that does not is cast or refused, as before."""
    handle, pointer, fits = interpreter.TensorHandle, interpreter.tl.pointer_type, interpreter._validate_np_data_size
    check = handle.__post_init__
    fitting: set[tuple[Any, str]] = set()

    def init(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if type(dtype) is pointer or (data.dtype, dtype.name) in fitting:
            return
        check(self)
        fitting.add((data.dtype, dtype.name))

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[[Any, Any], Any]) -> Any:
        output, dtype = op(lhs.data, rhs.data), lhs.dtype.scalar
        if (output.dtype, dtype.name) not in fitting and not fits(output, dtype):
            output = output.astype(interpreter._get_np_dtype(dtype))
        return handle(output, dtype)

    handle.__init__ = init
    type(interpreter.interpreter_builder).binary_op = binary_op


def _take_operands_of_one_type_as_they_are(interpreter: Any) -> None:
    """Of two tensors of one dtype, or of a pointer and a number of elements, nothing is cast. A small number beside a tensor of floats or
    integers becomes one of its dtype: the array is made once, and cannot be written to."""
    core, semantic = interpreter.tl.core, type(interpreter.interpreter_semantic)
    check, handle, tensor = semantic.binary_op_type_checking_impl, interpreter.TensorHandle, core.tensor
    floats, integers = ("fp32", "fp64"), ("int32", "int64")
    plain = frozenset((*floats, *integers))
    arrays: dict[tuple[Any, ...], Any] = {}

    def small(value: Any, dtype: Any) -> bool:
        if type(value) is int:
            return 0 <= value < 128 and dtype.name in plain
        return type(value) is float and dtype.name in floats and (value == 0 or 1e-30 < abs(value) < 1e30)

    def constant(self: Any, value: float, like: Any) -> Any:
        dtype, kind = like.dtype, like.type
        shape = tuple(kind.shape.values) if kind.is_block() else ()
        key = (type(value), value, math.copysign(1, value), dtype.name, shape)
        data = arrays.get(key)
        if data is None:
            made = self.scalar_constant(value, dtype=dtype)
            if shape:
                made, _ = self.broadcast_impl_value(made, like)
            data = arrays[key] = made.handle.data
            data.flags.writeable = False
        return tensor(handle(data, dtype), kind)

    @functools.wraps(check)
    def operands(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if type(lhs) is tensor and type(lhs.dtype) is core.dtype:
            if type(rhs) is tensor and rhs.dtype.name == lhs.dtype.name and lhs.dtype.name in plain:
                return self.broadcast_impl_value(lhs, rhs)
            if arithmetic_check and small(rhs, lhs.dtype):
                return lhs, constant(self, rhs, lhs)
        elif type(lhs) is tensor and type(rhs) is tensor and allow_lhs_ptr and rhs.dtype.name in integers:
            return self.broadcast_impl_value(lhs, rhs)
        elif arithmetic_check and type(rhs) is tensor and type(rhs.dtype) is core.dtype and small(lhs, rhs.dtype):
            return constant(self, lhs, rhs), rhs
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    semantic.binary_op_type_checking_impl = operands
