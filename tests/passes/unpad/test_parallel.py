"""Padding under DistributedDataParallel and FSDP2: out of a graph that is compiled whole, and in one that is cut."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.passes.unpad.encoder import MASK, Encoder, compiled, ids_of, mask_of, on_real_tokens, report


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone. The first bucket holds one parameter, the second all others."""
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 100)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _check(model: nn.Module, plain: nn.Module, mask: torch.Tensor, function: nn.Module) -> None:
    model.zero_grad()
    plain.zero_grad()
    ids = ids_of(mask)
    found, expected = (on_real_tokens(f(ids, mask), mask) for f in (function, plain))
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    found.sin().sum().backward()
    expected.sin().sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    for mine, right in pairs:
        assert mine.grad is not None
        torch.testing.assert_close(_whole(mine.grad), right.grad, atol=2e-5, rtol=1e-4)


def test_a_whole_graph_under_ddp() -> None:
    plain = Encoder()
    wrapped = DistributedDataParallel(copy.deepcopy(plain))
    with torch._dynamo.config.patch(optimize_ddp=False):
        function = compiled(wrapped)
        for mask in (MASK, mask_of(10, 2, 3)):
            _check(wrapped, plain, mask, function)
    assert report().kept is None
    assert report().last[-1].failed == ()


def test_buckets_keep_the_padding() -> None:
    plain = Encoder()
    wrapped = DistributedDataParallel(copy.deepcopy(plain), bucket_cap_mb=1)
    function = compiled(wrapped, strict=False)
    for mask in (MASK, mask_of(10, 2, 3)):
        _check(wrapped, plain, mask, function)
    kept = report().kept
    assert kept is not None
    assert "buckets" in kept.observed
    assert kept.remedy is not None
    assert "optimize_ddp" in kept.remedy


def test_fsdp2_around_a_whole_model() -> None:
    plain = Encoder()
    sharded = copy.deepcopy(plain)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    _check(sharded, plain, MASK, compiled(sharded))
    assert report().kept is None


def test_fsdp2_around_each_layer() -> None:
    """Layers that are graphs of their own get a mask of four axes, and keep the padding: each would wait for the number of tokens."""
    plain = Encoder()
    sharded = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (1,))
    for module in [*sharded.layers, sharded]:
        fully_shard(module, mesh=mesh)
    _check(sharded, plain, MASK, compiled(sharded))
    kept = report().kept
    assert kept is not None
    assert "one tensor over (batch row, position)" in (kept.remedy or "")
