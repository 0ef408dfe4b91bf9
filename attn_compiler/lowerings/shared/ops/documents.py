"""The op that numbers documents, `attn_compiler::document_numbers`: int32 numbers for whole numbers of 64 bits.

Kernels compare documents in 32 bits, and a cumsum of PyTorch gives 64. Where all numbers of a row fit, they stay. Otherwise a position gets
the index of the first key of its document, or -1. Nothing is sorted, and nobody waits for the device: its kernel looks at the row itself
(kernels/document_numbers.py). On an H200 a sort, a search and their launches took longer than the attention of 8192 tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_compiler.lowerings.shared.ops.leaf_ops import late
from attn_compiler.torch_private.op_library import register_helper


def numbered(queries: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return int32 numbers for int64 (B, Sq) and (B, Skv), equal where those are; by PyTorch's ops.

    keys: None where they are those of the queries; then the second result is empty.
    """
    joined = queries.contiguous() if keys is None else torch.cat([queries, keys], 1)
    ranks = torch.searchsorted(torch.sort(joined, dim=1)[0], joined, out_int32=True)
    split = queries.shape[1]
    packed = torch.contiguous_format
    return ranks[:, :split].clone(memory_format=packed), ranks[:, split:].clone(memory_format=packed)


def empty_numbers(queries: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """Allocate the results."""
    of_keys = (queries.shape[0], 0) if keys is None else keys.shape
    return queries.new_empty(queries.shape, dtype=torch.int32), queries.new_empty(of_keys, dtype=torch.int32)


register_helper(
    "document_numbers",
    "(Tensor queries, Tensor? keys) -> (Tensor, Tensor)",
    function=numbered,
    fake=empty_numbers,
    on_gpu=late("shared.calls.document_launch", "numbers"),
    notes=True,
    exact_strides=True,
)

OP = torch.ops.attn_compiler.document_numbers.default
