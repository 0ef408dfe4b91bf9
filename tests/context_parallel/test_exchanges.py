"""What ranks send each other: collectives, exchanges, and that they are in step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import aot_function, make_boxed_compiler
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from attn_compiler import ContextParallel
from attn_compiler.context_parallel import collectives as torch_collectives, layout, rank_sync, slots
from attn_compiler.context_parallel.layout import Layout
from attn_compiler.context_parallel.rank_sync import RanksDisagree, agree
from attn_compiler.reasons.errors import ContextParallelInput
from tests.context_parallel import exchanges
from tests.context_parallel.exchanges import BALANCES, COUNTS, DIMS, DTYPES, TOTALS
from tests.distributed import processes
from tests.meshes import fake_mesh


# What ranks put together, and its gradients, against one process that has it all.
@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return processes.run(exchanges.of_two, size=2)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return processes.run(exchanges.of_four, size=4)


def _check_unshard(ranks: list[dict[str, Any]], balance: str | None, dim: int) -> None:
    layout = Layout(size=len(ranks), balanced=balance is not None)
    gradient = sum(exchanges.weights(dim, rank) for rank in range(len(ranks)))
    for rank, outcome in enumerate(ranks):
        found, mine = outcome["unshard"][balance, dim]
        assert found.equal(exchanges.whole(dim))
        assert mine.equal(layout.part(gradient, dim, rank))  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("balance", BALANCES)
def test_two_ranks_put_a_sequence_together(two: list[dict[str, Any]], balance: str | None, dim: int) -> None:
    _check_unshard(two, balance, dim)


@pytest.mark.parametrize("balance", BALANCES)
def test_four_ranks_put_a_sequence_together(four: list[dict[str, Any]], balance: str | None) -> None:
    _check_unshard(four, balance, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_put_together(two: list[dict[str, Any]], dtype: torch.dtype) -> None:
    for outcome in two:
        assert outcome["dtypes"][dtype].equal(exchanges.whole(1, dtype))


def test_padding_is_cut_off(two: list[dict[str, Any]]) -> None:
    """Ranks have 0 1 2 3 and 4 5 6 7, of which each has the first half of one half."""
    assert [outcome["without padding"].tolist() for outcome in two] == [[[0, 1, 4, 5, 6]]] * 2


def _check_mean(ranks: list[dict[str, Any]]) -> None:
    size = len(ranks)
    count = sum(COUNTS[:size])
    for outcome in ranks:
        found = outcome["mean"]
        assert found["mean"] == torch.tensor(sum(TOTALS[:size]) / count)
        assert found["mean"].dtype == torch.float32
        # The average over ranks is 1 / count.
        assert found["gradient"] == torch.tensor(size / count)
        assert found["of two losses"].equal(torch.tensor([sum(TOTALS[:size]) / count, 1.0]))
        assert found["of whole numbers"] == torch.tensor(sum(range(size)) / (2 * size))
        assert found["of many"].item() == size / (2**24 + 1)


def test_the_mean_of_two_ranks(two: list[dict[str, Any]]) -> None:
    _check_mean(two)


def test_the_mean_of_four_ranks(four: list[dict[str, Any]]) -> None:
    _check_mean(four)


def test_compiled_code_exchanges_the_same(two: list[dict[str, Any]]) -> None:
    for outcome in two:
        torch.testing.assert_close(*outcome["compiled"])


def _check_step(ranks: list[dict[str, Any]], balance: str | None, groups: int) -> None:
    """A loss for each group of ranks, averaged over groups."""
    model = exchanges.Tokens()
    losses, scores = [], []
    for group in range(groups):
        batch = exchanges.batch_of(group)
        scores.append(model(batch["input_ids"], torch.arange(exchanges.TOKENS)))
        losses.append(F.cross_entropy(scores[-1][:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()))
    torch.stack(losses).mean().backward()
    expected = exchanges.gradients(model)
    assert len(expected) == 4
    for rank, outcome in enumerate(ranks):
        group = rank * groups // len(ranks)
        # Nobody learns a place that is all padding.
        wanted = {"loss": losses[group].detach(), "logits": scores[group].detach(), **expected}
        torch.testing.assert_close(outcome["step"][balance], wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("balance", BALANCES)
def test_a_step_is_that_of_one_process(two: list[dict[str, Any]], balance: str | None) -> None:
    _check_step(two, balance, 1)


def test_a_step_of_two_groups_is_that_of_one_process(four: list[dict[str, Any]]) -> None:
    _check_step(four, "head_tail", 2)


def test_the_mean_over_all_tokens_of_all_groups(four: list[dict[str, Any]]) -> None:
    """A group with more tokens counts for more."""
    model, total, count = exchanges.Tokens(), torch.zeros(()), 0
    for group in (0, 2):
        batch = exchanges.batch_of(group)
        targets = batch["labels"][:, 1:].flatten()
        scores = model(batch["input_ids"], torch.arange(exchanges.TOKENS))[:, :-1]
        total = total + F.cross_entropy(scores.flatten(0, 1), targets, reduction="sum")
        count += int((targets != -100).sum())
    (total / count).backward()
    for outcome in four:
        found = {name: x for name, x in outcome["step of all tokens"].items() if name != "logits"}
        wanted = {"loss": (total / count).detach(), **exchanges.gradients(model)}
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


def test_one_rank_exchanges_nothing() -> None:
    """The collectives of this mesh would give something else."""
    with fake_mesh(1) as mesh:
        cp = ContextParallel(mesh)
        x = torch.randn(2, 5, 3)
        assert cp.unshard(x) is x
        assert cp.unshard(x, length=4).equal(x[:, :4])
        assert cp.mean(torch.tensor(6.0), 4) == 1.5
        assert cp.shard(input_ids=torch.ones(1, 3, dtype=torch.long), pad=False)["position_ids"].tolist() == [[0, 1, 2]]


def test_shard_takes_what_every_rank_has_from_the_option() -> None:
    with fake_mesh(2, rank=1) as mesh:
        cp = ContextParallel(mesh, replicated=("image",), load_balance=None)
        image = torch.randn(2, 3, 5, 5)
        part = cp.shard(input_ids=torch.arange(6).view(2, 3), image=image, pad_id=7)
        assert part["image"] is image
        assert part["input_ids"].tolist() == [[2, 7], [5, 7]]
        with pytest.raises(ContextParallelInput, match="The next length that can be cut is 4"):
            cp.shard(input_ids=torch.ones(2, 3), pad=False)


def test_what_can_not_be_put_together_is_refused() -> None:
    with fake_mesh(2) as mesh:
        cp = ContextParallel(mesh)
        with pytest.raises(
            ContextParallelInput, match=r"unshard\(dim=\): x has an axis 3; got a tensor of \(2, 4, 3\)"
        ):
            cp.unshard(torch.ones(2, 4, 3), 3)
        with pytest.raises(ContextParallelInput, match=r"unshard\(x=\): a part has two chunks .* got a length of 5"):
            cp.unshard(torch.ones(2, 5))
        with pytest.raises(
            ContextParallelInput, match=r"unshard\(length=\): it is at most 8, that of all parts; got 9"
        ):
            cp.unshard(torch.ones(2, 4), length=9)
        with pytest.raises(
            ContextParallelInput, match=r"positions\(length=\): a part has two chunks .* got a length of 3"
        ):
            cp.positions(3)
        with pytest.raises(ContextParallelInput, match=r"mean\(total=\): it is a tensor; got a float"):
            cp.mean(3.0, 2)  # type: ignore[arg-type]
        with pytest.raises(ContextParallelInput, match=r"mean\(count=\): .*got counts of \(2,\) for totals of \(3,\)"):
            cp.mean(torch.ones(3), torch.ones(2))


# What collectives become in a graph, and that a rank's part and the whole are each other's inverse.
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


# Which rank keeps which position of a cache.
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("pieces", [(7, 1, 1, 1), (2, 1, 3, 5), (1,) * 9, (12,)])
def test_each_position_is_kept_once_and_comes_back_in_order(size: int, pieces: tuple[int, ...]) -> None:
    kept = [torch.zeros(2, 1, slots.count(12, size), 3) for _ in range(size)]
    whole = torch.randn(2, 1, sum(pieces), 3)
    start = 0
    for length in pieces:
        for rank, one in enumerate(kept):
            slots.write((one,), (whole[:, :, start : start + length],), torch.tensor(start), size, torch.tensor(rank))
        start += length
    found = slots.joined(torch.stack(kept))
    assert torch.equal(found[:, :, :start], whole)
    assert not found[:, :, start:].any()
    assert slots.positions(4, size, torch.tensor(0)).tolist() == [0, size, 2 * size, 3 * size]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_what_does_not_fit_is_an_error_on_every_rank(rank: int, length: int) -> None:
    kept = torch.zeros(1, 1, 3, 2)
    with pytest.raises(IndexError):
        slots.write((kept,), (torch.ones(1, 1, length, 2),), torch.tensor(7 - length), 2, torch.tensor(rank))
    slots.write((kept,), (torch.ones(1, 1, length, 2),), torch.tensor(6 - length), 2, torch.tensor(rank))
