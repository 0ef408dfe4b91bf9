"""What ranks put together, and its gradients, against one process that has it all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from attn_compiler import ContextParallel
from attn_compiler.context_parallel.layout import Layout
from attn_compiler.reasons.errors import ContextParallelInput
from tests.context_parallel import exchanges
from tests.context_parallel.exchanges import BALANCES, COUNTS, DIMS, DTYPES, TOTALS
from tests.distributed import processes
from tests.meshes import fake_mesh


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
