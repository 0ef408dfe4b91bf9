"""What PyTorch lacks to run the DTensors of these tests on a CPU: it knows how its GPU kernels of attention may be sharded."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

aten = torch.ops.aten
_ALIKE = (Replicate(), Shard(0), Shard(1))


@functools.cache
def install() -> None:
    """In this process: SDPA's kernel for CPUs may be sharded as those for GPUs are, over the batch or over heads."""
    register_sharding(aten._scaled_dot_product_flash_attention_for_cpu.default)(_forward)
    register_sharding(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)(_backward)


def _forward(q: Any, k: Any, v: Any, *others: Any, **kwargs: Any) -> list[Any]:
    return [([placed] * 2, [placed] * 3 + [None] * len(others)) for placed in _ALIKE]


def _backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *others: Any, **kwargs: Any) -> list[Any]:
    return [([placed] * 3, [placed] * 6 + [None] * len(others)) for placed in _ALIKE]
