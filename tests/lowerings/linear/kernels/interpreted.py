"""Triton's interpreter with bfloat16 as GPUs have it: rounded to the nearest, and multiplied as numbers.

The interpreter holds bfloat16 as integers, cuts the other bits off, and multiplies the integers
(https://github.com/triton-lang/triton/issues/11584).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _rounded(data: Any) -> Any:
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(data), np.uint16(0x7FC0), nearest)


def _wide(x: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return x.data
    return (np.ascontiguousarray(x.data).astype(np.uint32) << 16).view(np.float32)


@contextlib.contextmanager
def with_bfloat16() -> Iterator[None]:
    """Within the block kernels compute in bfloat16 as on a GPU."""
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def rounding_cast(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return TensorHandle(_rounded(src.data), tl.bfloat16)
        return cast(self, src, dst_type)

    def of_numbers(self: Any, a: Any, b: Any, d: Any, *more: Any) -> Any:
        if a.dtype.scalar != tl.bfloat16:
            return dot(self, a, b, d, *more)
        return dot(self, TensorHandle(_wide(a), tl.float32), TensorHandle(_wide(b), tl.float32), d, *more)

    with (
        mock.patch.object(interpreter.InterpreterBuilder, "cast_impl", rounding_cast),
        mock.patch.object(interpreter.InterpreterBuilder, "create_dot", of_numbers),
    ):
        yield
