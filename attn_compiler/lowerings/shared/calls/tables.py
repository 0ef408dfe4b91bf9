"""`attn_compiler::gathered`: elements of a learned table, whose gradient is summed up in one order, and never in half precision.

Inductor sums a table's gradient by atomic additions: in any order, on a GPU in the table's dtype, and one after the other where few
elements get them all (milliseconds in benchmarks/results/sites_h200.csv). Compiled code gathers by PyTorch's own op, which Inductor fuses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_compiler.spec.dtypes import computed_in
from attn_compiler.torch_private.op_library import register_helper

aten = torch.ops.aten


def _gathered(table: Tensor, at: Sequence[Tensor]) -> Tensor:
    """Return elements of the table at indices of its first axes, which broadcast: (…, trailing sizes of the table)."""
    # Indexing by Python reads an index of no axes as a number, which a trace does not have.
    found: Tensor = aten.index.Tensor(table, list(at))
    return found


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    table, at = inputs
    ctx.shape, ctx.dtype = table.shape, table.dtype
    ctx.save_for_backward(*at)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    at = list(ctx.saved_tensors)
    sums = torch.ops.attn_compiler.table_sums(grad.to(computed_in(grad.dtype)), at, ctx.shape)
    return sums.to(ctx.dtype), [None] * len(at)


def _sums(grad: Tensor, at: Sequence[Tensor], size: Sequence[int]) -> Tensor:
    rows = _rows(at, size)
    rows_of_all, width = math.prod(size[: len(at)]), math.prod(size[len(at) :])
    return grad.new_zeros(rows_of_all, width).index_add_(0, rows, grad.reshape(rows.shape[0], width)).view(size)


def _sums_on_gpu(grad: Tensor, at: Sequence[Tensor], size: Sequence[int]) -> Tensor:
    """Sum by the kernel for embeddings, which sorts, and adds up without atomics."""
    rows, width = _rows(at, size), math.prod(size[len(at) :])
    grad = grad.reshape(rows.shape[0], width)
    sums: Tensor = aten.embedding_dense_backward.default(grad, rows, math.prod(size[: len(at)]), -1, False)
    return sums.view(size)


def _rows(at: Sequence[Tensor], size: Sequence[int]) -> Tensor:
    """Return the index of each row, (N,), in a table whose indexed axes are flattened."""
    rows = torch.zeros((), dtype=torch.int64, device=at[0].device)
    for index, length in zip(at, size, strict=False):
        rows = rows * length + torch.where(index < 0, index + length, index)
    return rows.flatten()


register_helper(
    "gathered",
    "(Tensor table, Tensor[] at) -> Tensor",
    function=_gathered,
    differentiated=(_setup, _gradient),
    plain=aten.index.Tensor,
)
register_helper(
    "table_sums",
    "(Tensor grad, Tensor[] at, SymInt[] size) -> Tensor",
    function=_sums,
    fake=lambda grad, at, size: grad.new_empty(size),
    on_gpu=_sums_on_gpu,
)
