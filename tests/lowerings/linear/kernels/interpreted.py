"""Triton's interpreter with bfloat16 as GPUs have it: rounded to the nearest, and multiplied as numbers.

The interpreter holds bfloat16 as integers, cuts the other bits off, and multiplies the integers
(https://github.com/triton-lang/triton/issues/11584).

Sums are those of tensor cores, too: 16 products and the sum so far are added up, and of what float32 has no bits for all is cut off
(Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", 2022).
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

#: products that a tensor core adds up at once
_AT_ONCE = 16


def _rounded(data: Any) -> Any:
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(data), np.uint16(0x7FC0), nearest)


def _wide(x: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return x.data
    return (np.ascontiguousarray(x.data).astype(np.uint32) << 16).view(np.float32)


def _cut_off(data: Any) -> Any:
    """Numbers in float64 as float32, towards zero."""
    nearest = data.astype(np.float32)
    return np.where(np.abs(nearest) > np.abs(data), np.nextafter(nearest, np.float32(0)), nearest)


def _summed(a: Any, b: Any, so_far: Any) -> Any:
    """As tensor cores add up products of a (M, K) and b (K, N) in bfloat16."""
    wide, other = a.astype(np.float64), b.astype(np.float64)
    for at in range(0, a.shape[1], _AT_ONCE):
        so_far = _cut_off(so_far.astype(np.float64) + wide[:, at : at + _AT_ONCE] @ other[at : at + _AT_ONCE])
    return so_far


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
        return TensorHandle(_summed(_wide(a), _wide(b), d.data), tl.float32)

    with (
        mock.patch.object(interpreter.InterpreterBuilder, "cast_impl", rounding_cast),
        mock.patch.object(interpreter.InterpreterBuilder, "create_dot", of_numbers),
    ):
        yield
