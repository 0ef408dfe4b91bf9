"""How DTensors lie on their mesh, as data. A group of two processes is made up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

from attn_compiler.torch_private import dtensors as torch_dtensors


@pytest.fixture(autouse=True)
def mesh() -> Iterator[DeviceMesh]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def _made(mesh: DeviceMesh, placement: Any, x: Tensor | None = None) -> DTensor:
    return DTensor.from_local(torch.ones(2, 3) if x is None else x, mesh, [placement], run_check=False)


def test_only_dtensors_are(mesh: DeviceMesh) -> None:
    plain = torch.ones(2)
    values = (_made(mesh, Replicate()), plain, TwoTensor(plain, plain), None)
    assert [torch_dtensors.is_dtensor(x) for x in values] == [True, False, False, False]


def test_how_one_lies(mesh: DeviceMesh) -> None:
    found = [torch_dtensors.shards(_made(mesh, placed), "x") for placed in (Shard(-1), Shard(0), Replicate())]
    assert [getattr(x, "dims", None) for x in found] == [(1,), (0,), (None,)]
    assert [getattr(x, "cut", None) for x in found] == [{1}, {0}, set()]


def test_what_is_not_known_is_told(mesh: DeviceMesh) -> None:
    assert "x is placed (P(sum))" in str(torch_dtensors.shards(_made(mesh, Partial()), "x"))
    uneven = DTensor.from_local(
        torch.ones(1, 3), mesh, [Shard(0)], run_check=False, shape=torch.Size((3, 3)), stride=(3, 1)
    )
    assert "x has 3 along axis 0, of which 2 processes have unequal shares" in str(torch_dtensors.shards(uneven, "x"))


def test_a_dtensor_of_a_local_tensor_has_the_other_one_s_sizes(mesh: DeviceMesh) -> None:
    like = DTensor.from_local(
        torch.ones(1, 3), mesh, [Shard(0)], run_check=False, shape=torch.Size((3, 3)), stride=(3, 1)
    )
    made = torch_dtensors.of_local(torch.ones(1, 5), like, (1, 0))
    assert (made.shape, made.stride(), made.placements) == ((3, 5), (1, 3), (Shard(0),))


def test_who_else_is_on_the_mesh(mesh: DeviceMesh) -> None:
    found = _made(mesh, Replicate())
    assert torch_dtensors.other_ranks(found) == {0}
    assert torch_dtensors.groups(found) == [mesh.get_group().group_name]
    alone = _made(DeviceMesh("cpu", [1]), Replicate())
    assert (torch_dtensors.other_ranks(alone), torch_dtensors.groups(alone)) == (frozenset(), [])


def test_a_share_is_this_process_s(mesh: DeviceMesh) -> None:
    whole = _made(mesh, Replicate(), torch.arange(8.0).view(4, 2))
    assert torch_dtensors.share_of(whole, (0,)).tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert torch_dtensors.share_of(whole, (None,)).shape == (4, 2)
