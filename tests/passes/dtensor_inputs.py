"""DTensors on a mesh of two processes, of which there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

B, H, S, D = 2, 2, 8, 16
LOCAL = (B, H, S, D)
HEADS, BATCH, WHOLE = [Shard(1)], [Shard(0)], [Replicate()]


def made(mesh: DeviceMesh, local: Sequence[int] | Tensor, placements: Sequence[Any], **kwargs: Any) -> DTensor:
    """One that has a gradient if it is made of numbers that nobody chose."""
    is_given = isinstance(local, Tensor)
    x = local if isinstance(local, Tensor) else torch.randn(*local)
    return DTensor.from_local(x, mesh, placements, run_check=False, **kwargs).requires_grad_(not is_given)


def qkv(mesh: DeviceMesh, placements: Sequence[Any], local: Sequence[int] = LOCAL) -> list[DTensor]:
    return [made(mesh, local, placements) for _ in range(3)]
