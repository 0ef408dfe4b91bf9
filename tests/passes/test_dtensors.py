"""Attention of DTensors becomes attention of their local tensors, where that is the same; where it is not, the reason is told.

A group of two processes is made up: no other process is there, so nothing may communicate. Whole results are compared in
tests/distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from attn_compiler import torch_dtensors
from attn_compiler.passes import dtensor_rules
from tests import dtensor_kernels
from tests.passes.compiling import CPU_FLASH, Compiled, compiled

B, H, S, D = 2, 2, 8, 16
LOCAL = (B, H, S, D)
HEADS, BATCH, WHOLE = [Shard(1)], [Shard(0)], [Replicate()]
SAID = "computed on this process's share of DTensors"
sdpa = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def mesh() -> Iterator[DeviceMesh]:
    """The first of two processes."""
    dtensor_kernels.install()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def _made(mesh: DeviceMesh, local: Sequence[int] | Tensor, placements: Sequence[Any], **kwargs: Any) -> DTensor:
    """One that has a gradient if it is made of numbers that nobody chose."""
    is_given = isinstance(local, Tensor)
    x = local if isinstance(local, Tensor) else torch.randn(*local)
    return DTensor.from_local(x, mesh, placements, run_check=False, **kwargs).requires_grad_(not is_given)


def _qkv(mesh: DeviceMesh, placements: Sequence[Any], local: Sequence[int] = LOCAL) -> list[DTensor]:
    return [_made(mesh, local, placements) for _ in range(3)]


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


def _refused(function: Callable[..., Any], *inputs: Tensor) -> str:
    """Why the only attention is none of ours."""
    run = compiled(function)
    run(*inputs)
    (miss,) = run.report.misses
    assert not run.report.sites
    assert miss.reason.remedy
    return f"{miss.reason.observed}; {miss.reason.remedy}"


# ---- what is taken ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("placements", [HEADS, BATCH, WHOLE], ids=str)
def test_an_sdpa_call_runs_on_local_tensors(mesh: DeviceMesh, placements: list[Any], inner: str) -> None:
    run = _same(lambda q, k, v: sdpa(q, k, v, is_causal=True), *_qkv(mesh, placements), inner=inner)
    assert run.site.spec.q.shape == LOCAL
    assert run.site.spec.mask.words == "causal"
    assert CPU_FLASH in run.calls
    assert any(note.startswith(SAID) for note in run.site.notes)


def test_groups_of_heads_stay_together(mesh: DeviceMesh) -> None:
    q, k, v = _made(mesh, (B, 4, S, D), HEADS), _made(mesh, LOCAL, HEADS), _made(mesh, LOCAL, HEADS)
    run = _same(lambda q, k, v: sdpa(q, k, v, enable_gqa=True), q, k, v)
    assert (run.site.spec.num_heads_q, run.site.spec.num_heads_kv) == (4, 2)


def test_what_reads_the_output_may_rely_on_its_strides(mesh: DeviceMesh) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2) * 2

    run = _same(function, *_qkv(mesh, [Shard(2)], (B, S, H, D)), inner="aot_eager")
    assert run.site.spec.mask.words == "causal"


def test_a_mesh_of_two_axes(mesh: DeviceMesh) -> None:
    two = init_device_mesh("cpu", (1, 2))
    run = _same(lambda q, k, v: sdpa(q, k, v), *_qkv(two, [Shard(0), Shard(1)]))
    assert "(S(0), S(1))" in str(run.site.notes)


def test_inside_of_a_checkpoint(mesh: DeviceMesh) -> None:
    def function(*qkv: Tensor) -> Tensor:
        return checkpoint(lambda q, k, v: sdpa(q, k, v, is_causal=True) * 2, *qkv, use_reentrant=False)

    assert _same(function, *_qkv(mesh, HEADS)).site.spec.mask.words == "causal"


def test_lengths_may_be_symbols(mesh: DeviceMesh) -> None:
    """Each length after the second runs the same code, and nothing is copied for it."""
    run = compiled(lambda q, k, v: sdpa(q, k, v, is_causal=True) * 2)
    for length in (8, 12, 20):
        q, k, v = _qkv(mesh, HEADS, (B, H, length, D))
        got, wanted = run(q, k, v), sdpa(q, k, v, is_causal=True) * 2
        assert got.shape == wanted.shape
        torch.testing.assert_close(got.to_local(), wanted.to_local())
    first, symbolic = run.reports
    assert len(first.sites) == len(symbolic.sites) == 1
    assert not symbolic.sites[0].copies


def test_it_can_be_verified(mesh: DeviceMesh) -> None:
    assert _same(lambda q, k, v: sdpa(q, k, v, is_causal=True), *_qkv(mesh, HEADS), verify=True).site


@pytest.mark.parametrize("placements", [HEADS, BATCH], ids=str)
def test_attention_that_is_written_out(mesh: DeviceMesh, placements: list[Any]) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)) * D**-0.5
        weights = F.dropout(torch.softmax(scores.float(), -1).to(q.dtype), 0.1, training=False)
        return weights @ v

    run = _same(function, *_qkv(mesh, placements))
    assert run.site.spec.q.shape == LOCAL
    assert CPU_FLASH in run.calls


def test_attention_of_three_axes_that_is_written_out(mesh: DeviceMesh) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(-1, -2)) / 4, -1), v)

    assert CPU_FLASH in _same(function, *_qkv(mesh, BATCH, (B, S, D))).calls


def test_weights_that_the_model_returns_are_dtensors_again(mesh: DeviceMesh) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(torch.bmm(q, k.transpose(-1, -2)) / 4, -1)
        return torch.bmm(weights, v), weights

    q, k, v = _qkv(mesh, BATCH, (B, S, D))
    for got, wanted in zip(compiled(function)(q, k, v), function(q, k, v), strict=True):
        _assert_same(got, wanted)


# ---- masks --------------------------------------------------------------------------------------------------------
# A head dim of v that differs keeps PyTorch from the kernel whose sharding knows of no mask.


def _masked(mask: Tensor, mesh: DeviceMesh, placements: list[Any], local: Sequence[int] = LOCAL) -> Compiled:
    q, k, _ = _qkv(mesh, placements, local)
    v = _made(mesh, (*local[:3], D // 2), placements)
    return _same(lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), q, k, v, mask, lowerings=["math"])


@pytest.mark.parametrize("placements", [HEADS, BATCH], ids=str)
def test_a_whole_mask_serves_every_share(mesh: DeviceMesh, placements: list[Any]) -> None:
    mask = _made(mesh, torch.ones(S, S, dtype=torch.bool).tril(), WHOLE)
    assert _masked(mask, mesh, placements).site.spec.mask.words.startswith("dense bool[1, 1, 8, 8]")


def test_a_mask_may_be_sharded_as_q_is(mesh: DeviceMesh) -> None:
    mask = _made(mesh, torch.ones(B, 1, S, S, dtype=torch.bool).tril(), BATCH)
    assert _masked(mask, mesh, BATCH).site.spec.mask.words.startswith("dense bool[2, 1, 8, 8]")


def test_a_share_is_cut_out_of_a_whole_mask(mesh: DeviceMesh) -> None:
    """Each of the two processes has half of the batch, and the mask of all."""
    mask = _made(mesh, torch.rand(2 * B, 1, S, S) < 0.9, WHOLE)
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

    q, k, v = (x.detach() for x in _qkv(mesh, placements))
    _same(attention, q, k, v, _made(mesh, numbers, WHOLE))


def test_a_mask_that_is_made_a_dtensor_is_proved(mesh: DeviceMesh) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = torch.arange(S)
        mask = DTensor.from_local(positions[:, None] >= positions, mesh, WHOLE, run_check=False)
        return sdpa(q, k, v, attn_mask=mask)

    q, k, _ = _qkv(mesh, BATCH)
    run = _same(function, q, k, _made(mesh, (B, H, S, D // 2), BATCH), lowerings=["math"])
    # torch 2.11 hides from what a DTensor is made.
    assert run.site.spec.mask.words in ("causal (proved)", "dense bool[1, 1, 8, 8]")
    assert run.site.spec.mask.words == "causal (proved)" or torch.__version__ < "2.13"


def test_no_gradient_goes_past_a_dtensor_without_one(mesh: DeviceMesh) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        with torch.no_grad():
            mask = DTensor.from_local(bias, mesh, WHOLE, run_check=False)
        return sdpa(q, k, v, attn_mask=mask)

    q, k, _ = _qkv(mesh, BATCH)
    bias = torch.randn(S, S, requires_grad=True)
    run = compiled(function, lowerings=["math"])
    run(q, k, _made(mesh, (B, H, S, D // 2), BATCH), bias).to_local().sum().backward()
    assert run.site
    assert bias.grad is None


def test_a_whole_bias_gets_parts_of_its_gradient(mesh: DeviceMesh) -> None:
    """Each process sees the heads that it has. PyTorch says so, too: the gradient is partial."""
    bias = _made(mesh, (1, 1, S, S), WHOLE)
    assert _masked(bias, mesh, HEADS).site


# ---- what is not --------------------------------------------------------------------------------------------------


def test_a_sharded_sequence_is_another_thing(mesh: DeviceMesh) -> None:
    told = _refused(lambda q, k, v: sdpa(q, k, v), *_qkv(mesh, [Shard(2)]))
    assert "query is sharded along its sequence, (S(2))" in told
    assert "context parallelism" in told


def test_a_sharded_sequence_that_is_written_out(mesh: DeviceMesh) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(-1, -2)) / 4, -1), v)

    assert "sharded along a sequence" in _refused(function, *_qkv(mesh, [Shard(1)], (B, S, D)))


def test_a_softmax_along_what_is_sharded(mesh: DeviceMesh) -> None:
    """PyTorch gives log_softmax such a result inside of loss_parallel."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    softmax = graph.call_function(torch.softmax, (x, -1))
    x.meta["example_value"] = softmax.meta["example_value"] = value = _made(mesh, (B, S, D), [Shard(2)])
    out = torch_dtensors.shards(value, "x")
    assert isinstance(out, torch_dtensors.Shards)
    assert "runs along an axis that is sharded" in str(dtensor_rules.refused(softmax, out))
    softmax.args = (x, 1)
    assert dtensor_rules.refused(softmax, out) is None


def test_a_sharded_head_dim(mesh: DeviceMesh) -> None:
    assert "head dim" in _refused(lambda q, k, v: sdpa(q, k, v), *_qkv(mesh, [Shard(3)]))


def test_partial_sums(mesh: DeviceMesh) -> None:
    assert "query is placed (P(sum))" in _refused(lambda q, k, v: sdpa(q, k, v), *_qkv(mesh, [Partial()]))


def test_placements_that_differ(mesh: DeviceMesh) -> None:
    q, (k, v, _) = _made(mesh, (2 * B, H, S, D), WHOLE), _qkv(mesh, BATCH)
    told = _refused(lambda q, k, v: sdpa(q, k, v), q, k, v)
    assert "query (R), key (S(0)), value (S(0))" in told


def test_unequal_shares(mesh: DeviceMesh) -> None:
    sizes = {"shape": torch.Size((B, 3, S, D)), "stride": (3 * S * D, S * D, D, 1)}
    qkv = [_made(mesh, LOCAL, HEADS, **sizes) for _ in range(3)]
    assert "query has 3 along axis 1, of which 2 processes have unequal shares" in _refused(sdpa, *qkv)


def test_a_size_that_is_sharded_and_symbolic(mesh: DeviceMesh) -> None:
    run = compiled(lambda q, k, v: sdpa(q, k, v), dynamic=True)
    run(*_qkv(mesh, HEADS, (B, 4, S, D)))
    assert "since the size is symbolic; compile with dynamic=False" in str(run.report.misses[0].reason)


def test_dropout(mesh: DeviceMesh) -> None:
    assert "dropout_p drops weights" in _refused(lambda q, k, v: sdpa(q, k, v, dropout_p=0.1), *_qkv(mesh, BATCH))


def test_a_bias_with_a_gradient_that_would_have_to_be_cut(mesh: DeviceMesh) -> None:
    q, k, _ = _qkv(mesh, BATCH)
    v, bias = _made(mesh, (B, H, S, D // 2), BATCH), _made(mesh, (2 * B, 1, S, S), WHOLE)
    told = _refused(lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), q, k, v, bias)
    assert "attn_mask is (R), and the attention (S(0)); redistribute attn_mask" in told


def test_equal_refusals_of_layers_are_one_row(mesh: DeviceMesh) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(3):
            weights = torch.softmax(torch.bmm(q, k.transpose(-1, -2)) / 4, -1)
            v = torch.bmm(weights, v)
        return v

    run = compiled(function)
    run(*_qkv(mesh, [Shard(1)], (B, S, D)))
    (miss,) = run.report.misses
    assert len(miss.modules) == 3
