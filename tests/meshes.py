"""A mesh of many ranks in one process. Its collectives do nothing: it is for what asks a mesh for sizes, ranks and names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_mesh(*shape: int, rank: int = 0, names: tuple[str, ...] | None = None) -> Iterator[DeviceMesh]:
    """The mesh as the process of this rank sees it."""
    world = 1
    for size in shape:
        world *= size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()
