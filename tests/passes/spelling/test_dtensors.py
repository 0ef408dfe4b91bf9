"""Attention of DTensors becomes attention of their local tensors, where that is the same; where it is not, the reason is told.

A group of two processes is made up: no other process is there, so nothing may communicate. Whole results are compared in
tests/distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from tests.passes.compiling import CPU_FLASH, Compiled, compiled
from tests.passes.dtensor_inputs import BATCH, HEADS, LOCAL, WHOLE, B, D, H, S, made, qkv

SAID = "computed on this process's share of DTensors"
sdpa = F.scaled_dot_product_attention


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _same(function: Callable[..., DTensor], *inputs: Tensor, inner: str = "eager", **options: Any) -> Compiled:
    """Output and gradients are those of eager, with the same placements. Returns what was compiled."""
    try:
        wanted = function(*inputs)
    except RuntimeError as error:
        pytest.skip(f"this PyTorch does not run it: {error}")
    run = compiled(function, inner=inner, **options)
    got = run(*inputs)
    _assert_same(got, wanted)
    assert got.stride() == wanted.stride()
    wanting = [x for x in inputs if x.requires_grad]
    if wanting:
        gradient = torch.randn_like(wanted.detach())
        grads = (torch.autograd.grad(out, wanting, gradient) for out in (got, wanted))
        for mine, eager in zip(*grads, strict=True):
            _assert_same(mine, eager)
    return run


def _assert_same(got: Tensor, wanted: Tensor) -> None:
    assert isinstance(got, DTensor)
    assert isinstance(wanted, DTensor)
    assert (got.placements, got.shape) == (wanted.placements, wanted.shape)
    torch.testing.assert_close(_local(got), _local(wanted))


# ---- what is taken ------------------------------------------------------------------------------------------------


@pytest.mark.in_turns
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("placements", [HEADS, BATCH, WHOLE], ids=str)
def test_an_sdpa_call_runs_on_local_tensors(mesh: DeviceMesh, placements: list[Any], inner: str) -> None:
    run = _same(lambda q, k, v: sdpa(q, k, v, is_causal=True), *qkv(mesh, placements), inner=inner)
    assert run.site.spec.q.shape == LOCAL
    assert run.site.spec.mask.words == "causal"
    assert CPU_FLASH in run.calls
    assert any(note.startswith(SAID) for note in run.site.notes)


def test_groups_of_heads_stay_together(mesh: DeviceMesh) -> None:
    q, k, v = made(mesh, (B, 4, S, D), HEADS), made(mesh, LOCAL, HEADS), made(mesh, LOCAL, HEADS)
    run = _same(lambda q, k, v: sdpa(q, k, v, enable_gqa=True), q, k, v)
    assert (run.site.spec.num_heads_q, run.site.spec.num_heads_kv) == (4, 2)


def test_what_reads_the_output_may_rely_on_its_strides(mesh: DeviceMesh) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2) * 2

    run = _same(function, *qkv(mesh, [Shard(2)], (B, S, H, D)), inner="aot_eager")
    assert run.site.spec.mask.words == "causal"


def test_a_softmax_whose_axis_is_moved_keeps_its_note(mesh: DeviceMesh) -> None:
    run = _same(lambda q, k, v: (v.mT @ (k @ q.mT * 0.25).softmax(-2)).mT, *qkv(mesh, HEADS))
    assert run.site.notes[-1].startswith(SAID)


def test_a_mesh_of_two_axes(mesh: DeviceMesh) -> None:
    two = init_device_mesh("cpu", (1, 2))
    run = _same(lambda q, k, v: sdpa(q, k, v), *qkv(two, [Shard(0), Shard(1)]))
    assert "(S(0), S(1))" in str(run.site.notes)


def test_inside_of_a_checkpoint(mesh: DeviceMesh) -> None:
    def function(*qkv: Tensor) -> Tensor:
        return checkpoint(lambda q, k, v: sdpa(q, k, v, is_causal=True) * 2, *qkv, use_reentrant=False)

    assert _same(function, *qkv(mesh, HEADS)).site.spec.mask.words == "causal"


def test_lengths_may_be_symbols(mesh: DeviceMesh) -> None:
    """Each length after the second runs the same code, and nothing is copied for it."""
    run = compiled(lambda q, k, v: sdpa(q, k, v, is_causal=True) * 2)
    for length in (8, 12, 20):
        q, k, v = qkv(mesh, HEADS, (B, H, length, D))
        got, wanted = run(q, k, v), sdpa(q, k, v, is_causal=True) * 2
        assert got.shape == wanted.shape
        torch.testing.assert_close(got.to_local(), wanted.to_local())
    first, symbolic = run.reports
    assert len(first.sites) == len(symbolic.sites) == 1
    assert not symbolic.sites[0].copies


def test_it_can_be_verified(mesh: DeviceMesh) -> None:
    assert _same(lambda q, k, v: sdpa(q, k, v, is_causal=True), *qkv(mesh, HEADS), verify=True).site


@pytest.mark.parametrize("placements", [HEADS, BATCH], ids=str)
def test_attention_that_is_written_out(mesh: DeviceMesh, placements: list[Any]) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)) * D**-0.5
        weights = F.dropout(torch.softmax(scores.float(), -1).to(q.dtype), 0.1, training=False)
        return weights @ v

    run = _same(function, *qkv(mesh, placements))
    assert run.site.spec.q.shape == LOCAL
    assert CPU_FLASH in run.calls


def test_attention_of_three_axes_that_is_written_out(mesh: DeviceMesh) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(-1, -2)) / 4, -1), v)

    assert CPU_FLASH in _same(function, *qkv(mesh, BATCH, (B, S, D))).calls


def test_weights_that_the_model_returns_are_dtensors_again(mesh: DeviceMesh) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(torch.bmm(q, k.transpose(-1, -2)) / 4, -1)
        return torch.bmm(weights, v), weights

    q, k, v = qkv(mesh, BATCH, (B, S, D))
    for got, wanted in zip(compiled(function)(q, k, v), function(q, k, v), strict=True):
        _assert_same(got, wanted)


# ---- masks --------------------------------------------------------------------------------------------------------
# A head dim of v that differs keeps PyTorch from the kernel whose sharding knows of no mask.


def _masked(mask: Tensor, mesh: DeviceMesh, placements: list[Any], local: Sequence[int] = LOCAL) -> Compiled:
    q, k, _ = qkv(mesh, placements, local)
    v = made(mesh, (*local[:3], D // 2), placements)
    return _same(lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), q, k, v, mask, lowerings=["math"])


@pytest.mark.parametrize("placements", [HEADS, BATCH], ids=str)
def test_a_whole_mask_serves_every_share(mesh: DeviceMesh, placements: list[Any]) -> None:
    mask = made(mesh, torch.ones(S, S, dtype=torch.bool).tril(), WHOLE)
    assert _masked(mask, mesh, placements).site.spec.mask.words.startswith("dense bool[1, 1, 8, 8]")


def test_a_mask_may_be_sharded_as_q_is(mesh: DeviceMesh) -> None:
    mask = made(mesh, torch.ones(B, 1, S, S, dtype=torch.bool).tril(), BATCH)
    assert _masked(mask, mesh, BATCH).site.spec.mask.words.startswith("dense bool[2, 1, 8, 8]")


def test_a_share_is_cut_out_of_a_whole_mask(mesh: DeviceMesh) -> None:
    """Each of the two processes has half of the batch, and the mask of all."""
    mask = made(mesh, torch.rand(2 * B, 1, S, S) < 0.9, WHOLE)
    assert _masked(mask, mesh, BATCH).site.spec.mask.words.startswith("dense bool[2, 1, 8, 8]")


@pytest.mark.parametrize("placements", [BATCH, HEADS], ids=["batch", "heads"])
def test_what_is_written_to_a_whole_bias_between_two_uses_counts(placements: list[Any], mesh: DeviceMesh) -> None:
    """A share that was cut out of it is a copy."""
    shape = (2 * B, 1, S, S) if placements is BATCH else (1, 2 * H, S, S)
    numbers = torch.rand(shape)

    def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        bias = bias + 0
        scores = q @ k.transpose(-1, -2) * 0.25 + bias
        bias.mul_(3)
        return torch.softmax(scores + bias, -1) @ v

    q, k, v = (x.detach() for x in qkv(mesh, placements))
    _same(attention, q, k, v, made(mesh, numbers, WHOLE))


def test_a_mask_that_is_made_a_dtensor_is_proved(mesh: DeviceMesh) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = torch.arange(S)
        mask = DTensor.from_local(positions[:, None] >= positions, mesh, WHOLE, run_check=False)
        return sdpa(q, k, v, attn_mask=mask)

    q, k, _ = qkv(mesh, BATCH)
    run = _same(function, q, k, made(mesh, (B, H, S, D // 2), BATCH), lowerings=["math"])
    # torch 2.11 hides from what a DTensor is made.
    assert run.site.spec.mask.words in ("causal (proved)", "dense bool[1, 1, 8, 8]")
    assert run.site.spec.mask.words == "causal (proved)" or torch.__version__ < "2.13"


def test_no_gradient_goes_past_a_dtensor_without_one(mesh: DeviceMesh) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        with torch.no_grad():
            mask = DTensor.from_local(bias, mesh, WHOLE, run_check=False)
        return sdpa(q, k, v, attn_mask=mask)

    q, k, _ = qkv(mesh, BATCH)
    bias = torch.randn(S, S, requires_grad=True)
    run = compiled(function, lowerings=["math"])
    run(q, k, made(mesh, (B, H, S, D // 2), BATCH), bias).to_local().sum().backward()
    assert run.site
    assert bias.grad is None


def test_a_whole_bias_gets_parts_of_its_gradient(mesh: DeviceMesh) -> None:
    """Each process sees the heads that it has. PyTorch says so, too: the gradient is partial."""
    bias = made(mesh, (1, 1, S, S), WHOLE)
    assert _masked(bias, mesh, HEADS).site


# ---- what is not --------------------------------------------------------------------------------------------------


def test_equal_refusals_of_layers_are_one_row(mesh: DeviceMesh) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(3):
            weights = torch.softmax(torch.bmm(q, k.transpose(-1, -2)) / 4, -1)
            v = torch.bmm(weights, v)
        return v

    run = compiled(function)
    run(*qkv(mesh, [Shard(1)], (B, S, D)))
    (miss,) = run.report.misses
    assert len(miss.modules) == 3
