"""When an op on DTensors is the same on their local tensors, and what is said where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Shard

from attn_compiler.passes.spelling import dtensor_rules
from attn_compiler.torch_private import dtensors as torch_dtensors
from attn_compiler.torch_private.dtensors import Shards
from tests.passes.compiling import compiled
from tests.passes.dtensor_inputs import BATCH, HEADS, LOCAL, WHOLE, B, D, H, S, made, qkv

sdpa = F.scaled_dot_product_attention


def refused(function: Callable[..., Any], *inputs: Tensor) -> str:
    """Why the only attention is none of ours."""
    run = compiled(function)
    run(*inputs)
    (miss,) = run.report.misses
    assert not run.report.sites
    assert miss.reason.remedy
    return f"{miss.reason.observed}; {miss.reason.remedy}"


def test_a_sharded_sequence_is_another_thing(mesh: DeviceMesh) -> None:
    told = refused(lambda q, k, v: sdpa(q, k, v), *qkv(mesh, [Shard(2)]))
    assert "query is sharded along its sequence, (S(2))" in told
    assert "context_parallel" in told


def test_a_sharded_sequence_that_is_written_out(mesh: DeviceMesh) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(-1, -2)) / 4, -1), v)

    assert "sharded along a sequence" in refused(function, *qkv(mesh, [Shard(1)], (B, S, D)))


def test_a_softmax_along_what_is_sharded(mesh: DeviceMesh) -> None:
    """PyTorch gives log_softmax such a result inside of loss_parallel."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    softmax = graph.call_function(torch.softmax, (x, -1))
    x.meta["example_value"] = softmax.meta["example_value"] = value = made(mesh, (B, S, D), [Shard(2)])
    out = torch_dtensors.shards(value, "x")
    assert isinstance(out, torch_dtensors.Shards)
    assert "runs along an axis that is sharded" in str(dtensor_rules.refused(softmax, out))
    softmax.args = (x, 1)
    assert dtensor_rules.refused(softmax, out) is None


def test_a_sharded_head_dim(mesh: DeviceMesh) -> None:
    assert "head dim" in refused(lambda q, k, v: sdpa(q, k, v), *qkv(mesh, [Shard(3)]))


def test_partial_sums(mesh: DeviceMesh) -> None:
    assert "query is placed (P(sum))" in refused(lambda q, k, v: sdpa(q, k, v), *qkv(mesh, [Partial()]))


def test_placements_that_differ(mesh: DeviceMesh) -> None:
    q, (k, v, _) = made(mesh, (2 * B, H, S, D), WHOLE), qkv(mesh, BATCH)
    told = refused(lambda q, k, v: sdpa(q, k, v), q, k, v)
    assert "query (R), key (S(0)), value (S(0))" in told


def test_unequal_shares(mesh: DeviceMesh) -> None:
    sizes = {"shape": torch.Size((B, 3, S, D)), "stride": (3 * S * D, S * D, D, 1)}
    qkv = [made(mesh, LOCAL, HEADS, **sizes) for _ in range(3)]
    assert "query has 3 along axis 1, of which 2 processes have unequal shares" in refused(sdpa, *qkv)


def test_a_size_that_is_sharded_and_symbolic(mesh: DeviceMesh) -> None:
    run = compiled(lambda q, k, v: sdpa(q, k, v), dynamic=True)
    run(*qkv(mesh, HEADS, (B, 4, S, D)))
    assert "since the size is symbolic; compile with dynamic=False" in str(run.report.misses[0].reason)


def test_dropout(mesh: DeviceMesh) -> None:
    assert "dropout_p drops weights" in refused(lambda q, k, v: sdpa(q, k, v, dropout_p=0.1), *qkv(mesh, BATCH))


def test_a_bias_with_a_gradient_that_would_have_to_be_cut(mesh: DeviceMesh) -> None:
    q, k, _ = qkv(mesh, BATCH)
    v, bias = made(mesh, (B, H, S, D // 2), BATCH), made(mesh, (2 * B, 1, S, S), WHOLE)
    told = refused(lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), q, k, v, bias)
    assert "attn_mask is (R), and the attention (S(0)); redistribute attn_mask" in told


# ---- rules by themselves --------------------------------------------------------------------------------------------


def shards(value: Tensor) -> Shards:
    found = torch_dtensors.shards(value, "x")
    assert isinstance(found, Shards)
    return found


def _added(mesh: DeviceMesh, other: Tensor) -> str | None:
    """Why q + other is not that sum of the shares of q, which has its share of the heads."""
    graph, q = fx.Graph(), made(mesh, LOCAL, HEADS)
    x, y = graph.placeholder("x"), graph.placeholder("y")
    total = graph.call_function(torch.add, (x, y))
    x.meta["example_value"] = total.meta["example_value"] = q
    y.meta["example_value"] = other
    found = dtensor_rules.refused(total, shards(q))
    return None if found is None else str(found)


@pytest.mark.parametrize(
    ("shape", "placements"),
    [((B, H, S, D), HEADS), ((B, 1, S, D), WHOLE), ((S, D), WHOLE), ((H, S, D), [Shard(0)]), ((1,), WHOLE)],
    ids=str,
)
def test_what_is_cut_alike_or_the_same_along_the_cut_fits(mesh: DeviceMesh, shape: Any, placements: Any) -> None:
    assert _added(mesh, made(mesh, torch.zeros(shape), placements)) is None


def test_a_share_of_what_is_whole_can_be_cut_out_without_a_gradient(mesh: DeviceMesh) -> None:
    whole = made(mesh, torch.zeros(B, 2 * H, S, D), WHOLE)
    assert _added(mesh, whole) is None
    assert "y is (R), and the attention (S(1))" in str(_added(mesh, whole.requires_grad_()))


def test_what_is_cut_otherwise_or_is_no_dtensor_with_a_gradient_does_not_fit(mesh: DeviceMesh) -> None:
    assert "y is (S(0))" in str(_added(mesh, made(mesh, torch.zeros(B, 2 * H, S, D), BATCH)))
    assert _added(mesh, torch.zeros(S, D)) is None
    assert "has a gradient of all processes' shares" in str(_added(mesh, torch.zeros(S, D, requires_grad=True)))
    # Of a tensor that is no DTensor nobody cuts a share.
    assert "y is no DTensor" in str(_added(mesh, torch.zeros(B, 2 * H, S, D)))


def test_what_writes_is_refused(mesh: DeviceMesh) -> None:
    graph, q = fx.Graph(), made(mesh, LOCAL, HEADS)
    x = graph.placeholder("x")
    written = graph.call_method("mul_", (x, 2.0))
    x.meta["example_value"] = written.meta["example_value"] = q
    assert "writes to what it is given" in str(dtensor_rules.refused(written, shards(q)))


@pytest.mark.parametrize(
    ("training", "share", "is_refused"),
    [(False, 0.5, False), (True, 0.0, False), (True, 0.5, True), (True, None, True)],
)
def test_dropout_counts_where_it_drops(mesh: DeviceMesh, training: bool, share: float | None, is_refused: bool) -> None:
    graph, q = fx.Graph(), made(mesh, LOCAL, HEADS)
    x = graph.placeholder("x")
    dropped = graph.call_function(F.dropout, (x,), {"training": training} | ({} if share is None else {"p": share}))
    x.meta["example_value"] = dropped.meta["example_value"] = q
    assert ("drops weights" in str(dtensor_rules.refused(dropped, shards(q)))) is is_refused


@pytest.mark.parametrize(
    ("shape", "placements", "sums", "dims"),
    [
        ((B, H, S, S), HEADS, (), None),
        # The same for all heads: each process has a part of the gradient.
        ((B, 1, S, S), WHOLE, (0,), None),
        ((S, S), WHOLE, (0,), None),
        ((B, 2 * H, S, S), WHOLE, (), (1,)),
    ],
    ids=str,
)
def test_what_a_process_takes(mesh: DeviceMesh, shape: Any, placements: Any, sums: Any, dims: Any) -> None:
    taken = dtensor_rules.taken(made(mesh, torch.zeros(shape), placements), shards(made(mesh, LOCAL, HEADS)), 4)
    assert (taken.sums, taken.dims) == (sums, dims)


def test_a_sum_that_is_not_made_yet_is_taken_by_nobody(mesh: DeviceMesh) -> None:
    with pytest.raises(ValueError, match="P\\(sum\\)"):
        dtensor_rules.taken(made(mesh, LOCAL, [Partial()]), shards(made(mesh, LOCAL, HEADS)), 4)


@pytest.mark.parametrize(
    ("value", "is_same"),
    [
        (torch.zeros(2, 3), True),
        (torch.zeros(3, 2).T, True),
        (torch.zeros(2, 4), False),
        (torch.zeros(2, 3, 1), False),
        (torch.zeros(2, 3).half(), False),
        (torch.zeros(2, 3, device="meta"), False),
    ],
)
def test_a_result_of_shares_agrees_with_the_model_s(value: Tensor, is_same: bool) -> None:
    node = fx.Graph().placeholder("x")
    assert (dtensor_rules.differs(node, value, torch.zeros(2, 3)) is None) is is_same
