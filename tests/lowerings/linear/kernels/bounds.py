"""Triton's interpreter with bounds: what a kernel reads or writes has to lie in the memory of a tensor that it was given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor


class OutOfBoundsError(Exception):
    """A kernel read or wrote where no tensor of its call lies."""


class _Memory:
    """Of one launch: the first address of each tensor's memory, and the one after it."""

    def __init__(self) -> None:
        self.kernel, self.ranges = "", [(0, 0)]

    def take(self, kernel: str, given: tuple[list[Any], dict[str, Any]]) -> None:
        storages = [x.untyped_storage() for x in (*given[0], *given[1].values()) if hasattr(x, "untyped_storage")]
        self.kernel, self.ranges = kernel, [(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in storages]

    def check(self, ptrs: Any, mask: Any) -> None:
        size = max(ptrs.get_element_ty().primitive_bitwidth // 8, 1)
        at = ptrs.data[np.broadcast_to(mask.data.astype(bool), ptrs.data.shape)].astype(np.int64)
        is_in = np.zeros(at.shape, bool)
        for first, end in self.ranges:
            is_in |= (at >= first) & (at + size <= end)
        if not is_in.all():
            raise OutOfBoundsError(f"{self.kernel}: {(~is_in).sum()} of {is_in.size} addresses")


@contextlib.contextmanager
def within_bounds() -> Iterator[None]:
    """Within the block a kernel that leaves its tensors raises."""
    memory, builder = _Memory(), interpreter.InterpreterBuilder
    began, load, store = GridExecutor._init_args_hst, builder.create_masked_load, builder.create_masked_store

    def taking(self: Any, *given: Any) -> Any:
        on_host = began(self, *given)
        memory.take(self.fn.__name__, on_host)
        return on_host

    def loading(self: Any, ptrs: Any, mask: Any, *more: Any) -> Any:
        memory.check(ptrs, mask)
        return load(self, ptrs, mask, *more)

    def storing(self: Any, ptrs: Any, value: Any, mask: Any, *more: Any) -> Any:
        memory.check(ptrs, mask)
        return store(self, ptrs, value, mask, *more)

    with (
        mock.patch.object(GridExecutor, "_init_args_hst", taking),
        mock.patch.object(builder, "create_masked_load", loading),
        mock.patch.object(builder, "create_masked_store", storing),
    ):
        yield
