"""Padding and shared prompts under DistributedDataParallel and FSDP2: graphs that are compiled whole, and graphs that are cut."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from attn_compiler.passes.unpad.unpadding import Unpadded
from attn_compiler.reporting.facts import LITTLE_SAVED, UnpaddedStep
from tests.distributed import processes
from tests.passes.unpad import test_sharing
from tests.passes.unpad.encoder import MASK, WIDTH, Decoder, Encoder, compiled, ids_of, mask_of, on_real_tokens, report
from tests.passes.unpad.test_sharing import FULL, GROUPS, RIGHT


@pytest.fixture
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


@pytest.mark.usefixtures("one_process")
def test_a_whole_graph_under_ddp() -> None:
    plain = Encoder()
    wrapped = DistributedDataParallel(copy.deepcopy(plain))
    with torch._dynamo.config.patch(optimize_ddp=False):
        function = compiled(wrapped)
        for mask in (MASK, mask_of(10, 2, 3)):
            _check(wrapped, plain, mask, function)
    assert report().kept is None
    assert report().last[-1].failed == ()


@pytest.mark.usefixtures("one_process")
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


@pytest.mark.usefixtures("one_process")
def test_fsdp2_around_a_whole_model() -> None:
    plain = Encoder()
    sharded = copy.deepcopy(plain)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    _check(sharded, plain, MASK, compiled(sharded))
    assert report().kept is None


@pytest.mark.usefixtures("one_process")
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


#: groups of the rows of each of two ranks, by batch: in the second one the last rank shares nothing, and runs the model's own graph
SHARED = ((GROUPS, GROUPS[::-1]), (GROUPS, (2,) * 6), ((2,) * 6, (0,) * 6))


def _wrapped(way: str, model: nn.Module) -> nn.Module:
    if way.startswith("ddp"):
        return DistributedDataParallel(model, bucket_cap_mb=1)
    mesh = init_device_mesh("cpu", (processes.SIZE,))
    for module in [*(model.layers if way == "fsdp2, layers" else ()), model]:
        fully_shard(module, mesh=mesh)
    return model


def _own_graph_if_nothing_is_shared(self: Unpadded, step: UnpaddedStep, *others: Any) -> UnpaddedStep:
    return step if step.number < step.positions else dataclasses.replace(step, failed=(LITTLE_SAVED,))


def shared_steps(ways: list[str]) -> list[Any]:
    """In each process of a group: how far losses and the gradients of all ranks are from eager's, and what the reports say."""
    rank, told = torch.distributed.get_rank(), []
    for way in ways:
        torch.manual_seed(0)
        plain = Decoder(ending=test_sharing.loss).double()
        away = 0.0
        with (
            mock.patch.object(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 100),
            torch._dynamo.config.patch(optimize_ddp=way == "ddp, buckets"),
            mock.patch.object(Unpadded, "_weighed", _own_graph_if_nothing_is_shared),
        ):
            wrapped = _wrapped(way, copy.deepcopy(plain))
            function = compiled(wrapped, unpad=False, share_prefix=True, strict=way != "ddp, buckets")
            for seed, groups in enumerate(SHARED):
                ids, mask = test_sharing.ids_of(groups[rank], seed), (FULL, RIGHT)[seed % 2]
                generator = torch.Generator().manual_seed(2 * seed + rank)
                labels = torch.randint(0, WIDTH, mask.shape, generator=generator)
                found, expected = (f(ids, mask, labels=labels) for f in (function, plain))
                found.backward()
                expected.backward()
                away = max(away, float((found - expected).abs()))
                for mine, own in zip(wrapped.parameters(), plain.parameters(), strict=True):
                    assert mine.grad is not None
                    assert own.grad is not None
                    torch.distributed.all_reduce(own.grad)
                    away = max(away, float((_whole(mine.grad) - own.grad / processes.SIZE).abs().max()))
                wrapped.zero_grad()
                plain.zero_grad()
        of = report()
        told.append((away, of.kept, [(step.number, step.positions, step.failed) for step in of.last]))
    return told


def test_ranks_share_prompts_each_for_itself() -> None:
    """Gradients are the mean over both ranks of eager's. A rank that shares nothing runs another graph than the other one."""
    ways = ["ddp", "fsdp2", "ddp, buckets", "fsdp2, layers"]
    for rank, of_ways in enumerate(processes.run(shared_steps, ways)):
        for way, (away, kept, last) in zip(ways, of_ways, strict=True):
            assert away < 1e-12, way
            assert (kept is None) == (way in ("ddp", "fsdp2")), kept
            if kept is None:
                assert [bool(failed) for *_, failed in last] == [False, rank == 1, rank == 0]
                assert all(failed or number < positions for number, positions, failed in last)
