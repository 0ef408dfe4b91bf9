"""What collectives become in a graph, and that a rank's part and the whole are each other's inverse; how ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import aot_function, make_boxed_compiler
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from attn_compiler.context_parallel import collectives as torch_collectives, layout
from attn_compiler.torch_private import rank_sync
from attn_compiler.torch_private.rank_sync import RanksDisagree, agree
from tests.meshes import fake_mesh

C10D = torch.ops._c10d_functional


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_joined_is_the_inverse_of_split(size: int, balanced: bool) -> None:
    whole = torch.arange(2 * 12 * 3).view(2, 12, 3)
    by_rank = layout.split(whole, 1, size, balanced)
    assert by_rank.shape == (size, 2, 12 // size, 3)
    assert torch.equal(layout.joined(by_rank, 1, balanced), whole)


def test_a_rank_has_a_chunk_of_the_front_and_one_of_the_back() -> None:
    by_rank = layout.split(torch.arange(8), 0, 2, True)
    assert by_rank.tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]


def _graphs(again: bool, *, checkpointed: bool = False) -> list[fx.GraphModule]:
    """The forward and the backward of an attention over gathered keys and values, on rank 0 of 2 that do not run.

    checkpointed: of two, each in a checkpoint.
    """
    found: list[fx.GraphModule] = []

    def compiler(gm: fx.GraphModule, _: Sequence[Any]) -> Any:
        found.append(gm)
        return gm.forward

    def parted(gm: fx.GraphModule, inputs: Any, **more: Any) -> Any:
        if again:
            torch_collectives.gather_again(gm.graph, group)
        return min_cut_rematerialization_partition(gm, inputs, **more)

    def attend(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        both = torch_collectives.gathered_sequence(kv, 2, 2, True, group)
        return scaled_dot_product_attention(q, both[..., :8], both[..., 8:])

    with fake_mesh(2) as mesh:
        group = str(mesh.get_group().group_name)
        q, kv = torch.randn(1, 2, 6, 8, requires_grad=True), torch.randn(1, 2, 6, 16, requires_grad=True)
        boxed = make_boxed_compiler(compiler)
        if checkpointed:
            backend = aot_autograd(fw_compiler=boxed, bw_compiler=boxed, partition_fn=parted)
            torch._dynamo.reset()
            torch.compile(_in_checkpoints(attend), backend=backend, fullgraph=True)(q, kv).sum().backward()
        else:
            aot_function(attend, boxed, boxed, parted)(q, kv).sum().backward()
    return found


def _in_checkpoints(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = checkpoint(attend, q, kv.sin(), use_reentrant=False)
        second: torch.Tensor = checkpoint(attend, first.cos(), kv.cos(), use_reentrant=False)
        return second * 2

    return run


def _count(gm: fx.GraphModule, op: object) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=op))


def _largest_kept(gm: fx.GraphModule) -> int:
    """Elements of the largest tensor of numbers that the forward gives the backward, besides its output."""
    _, *kept = gm.graph.output_node().args[0]
    values = [x.meta.get("val") for x in kept]
    return max(x.numel() for x in values if isinstance(x, torch.Tensor) and x.is_floating_point())


def test_the_backward_gathers_keys_again_and_the_forward_keeps_none() -> None:
    forward, backward = _graphs(again=True)
    assert _count(forward, C10D.all_gather_into_tensor.default) == 1
    assert _count(backward, C10D.all_gather_into_tensor.default) == 1
    assert _count(backward, C10D.all_to_all_single.default) == 1
    assert _largest_kept(forward) == 2 * 6 * 16


def test_a_checkpoint_gathers_them_again_and_keeps_none() -> None:
    forward, backward = _graphs(again=True, checkpointed=True)
    assert _count(forward, C10D.all_gather_into_tensor.default) == 2
    assert _count(backward, C10D.all_gather_into_tensor.default) == 2
    assert _largest_kept(forward) == 2 * 6 * 16


def test_without_that_they_are_kept() -> None:
    forward, backward = _graphs(again=False)
    assert _count(backward, C10D.all_gather_into_tensor.default) == 0
    assert _largest_kept(forward) > 2 * 6 * 16 or sum(1 for _ in forward.graph.output_node().all_input_nodes) > 4


def test_no_rank_stands_in_a_graph() -> None:
    with fake_mesh(4, rank=2) as mesh:
        group = str(mesh.get_group().group_name)
        assert rank_sync.rank_of(group) == 2
        assert torch_collectives.sequence_rank(torch.zeros(()), group).tolist() == 2


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    """Of two ranks, of which this process is the first."""
    found = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: found)
    return found


def _says(store: dist.HashStore, times: int, text: str) -> None:
    store.set(f"attn_compiler/0-1/{times}/1", text)


def test_ranks_that_say_the_same_agree_whatever_they_call_it(store: dist.HashStore) -> None:
    """A rank that compiled something else before has other names for its graphs."""
    _says(store, 1, "one")
    _says(store, 2, "two")
    with fake_mesh(2) as mesh:
        group = mesh.get_group().group_name
        agree(group, "graph 0/0", "one", seconds=5)
        agree(group, "graph 7/0", "two", seconds=5)


def test_another_answer_raises_at_once(store: dist.HashStore) -> None:
    _says(store, 1, "6 positions")
    with fake_mesh(2) as mesh, pytest.raises(RanksDisagree, match="rank 0: 8 positions; rank 1: 6 positions"):
        agree(mesh.get_group().group_name, "graph 0/0", "8 positions", seconds=60)


def test_no_answer_raises_after_a_while(store: dist.HashStore) -> None:
    with fake_mesh(2) as mesh, pytest.raises(RanksDisagree, match="rank 1 did not come to graph 0/0 within 1 s"):
        agree(mesh.get_group().group_name, "graph 0/0", "8 positions", seconds=1)


def test_the_ranks_of_a_group_are_those_of_the_world() -> None:
    with fake_mesh(2, 3, rank=4, names=("dp", "cp")) as mesh:
        found = [rank_sync.ranks_of(mesh[name].get_group().group_name) for name in ("dp", "cp")]
    assert found == [{1, 4}, {3, 4, 5}]
