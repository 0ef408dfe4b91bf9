"""What ops do with the axis of positions: those that mix it are refused by name, those beside it are taken."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from attn_compiler.reasons.errors import ContextParallelUnsupported
from tests.near_miss import linear_variants
from tests.passes.context_parallel.compiled import BATCH, LENGTH, WIDTH, Before, compile_and_run, positions


def _written(x: torch.Tensor) -> torch.Tensor:
    first = torch.zeros(x.shape[1])
    first[0] = 1
    return x + first[:, None]


def _shifted(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    return y


def _summed_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.cumsum_(1)
    return y


def _linear(x: torch.Tensor) -> torch.Tensor:
    """A layer of linear attention, whose function is taken as one node."""
    heads = x.unflatten(-1, (2, -1))
    out = _SCAN(heads, heads[..., 0], -torch.ones(2), heads, heads, chunk_size=16, dt_softplus=True)
    return out.flatten(2)  # type: ignore[no-any-return]


_SCAN = linear_variants.own("mamba2_chunk_scan")

MIXING: dict[str, Before] = {
    "linear_call": lambda m, x, d: _linear(x),
    "flip": lambda m, x, d: x.flip(1),
    "roll": lambda m, x, d: x.roll(1, 1),
    "cumsum": lambda m, x, d: x.cumsum(1),
    "cumsum in place": lambda m, x, d: _summed_in_place(x),
    "mean": lambda m, x, d: x - x.mean(1, keepdim=True),
    "max": lambda m, x, d: x - x.max(1, keepdim=True)[0],
    "var_mean": lambda m, x, d: x - torch.var_mean(x, 1, keepdim=True)[1],
    "sort": lambda m, x, d: x.transpose(1, 2).sort()[0].transpose(1, 2),
    "conv1d": lambda m, x, d: F.conv1d(x.transpose(1, 2), m.q.weight[..., None]).transpose(1, 2),
    "group_norm": lambda m, x, d: F.group_norm(x.transpose(1, 2), 2).transpose(1, 2),
    "written into zeros": lambda m, x, d: _written(x),
    "shifted into zeros": lambda m, x, d: _shifted(x),
    "ones that are dropped": lambda m, x, d: x * F.dropout(torch.ones(1, x.shape[1], 1), 0.5),
    "table of local positions": lambda m, x, d: x + m.embedding(torch.arange(x.shape[1])),
    "mean of the length": lambda m, x, d: x / x.shape[1],
    "einsum over positions": lambda m, x, d: x + torch.einsum("bsd,btd->bsd", x, x),
    "einsum of pairs": lambda m, x, d: x + torch.einsum("bsd,btd->bst", x, x).sum(-1, keepdim=True),
    "gather along the sequence": lambda m, x, d: x.gather(1, d["position_ids"][..., None].expand_as(x)),
    "index along the sequence": lambda m, x, d: x[:, torch.arange(x.shape[1] - 1, -1, -1)],
    "select along the sequence": lambda m, x, d: x.index_select(1, torch.arange(x.shape[1])),
    "bounds of the sequence": lambda m, x, d: x + m.embedding(torch.bucketize(d["position_ids"], d["position_ids"][0])),
    "einsum of a diagonal": lambda m, x, d: x + torch.einsum("bsd,bsd->b", x, x)[:, None, None],
}

BESIDE: dict[str, Before] = {
    "flip of features": lambda m, x, d: x.flip(2),
    "var_mean of features": lambda m, x, d: x - torch.var_mean(x, -1, keepdim=True)[1],
    "embedding of positions": lambda m, x, d: x + m.embedding(d["position_ids"]),
    "halved positions": lambda m, x, d: x + m.embedding(d["position_ids"] // 2),
    "zeros and ones": lambda m, x, d: x * torch.ones(LENGTH, 1) + torch.zeros(LENGTH, 1),
    "einsum of features": lambda m, x, d: torch.einsum("bsd,de->bse", x, m.q.weight),
    "table by positions": lambda m, x, d: x + m.embedding.weight[d["position_ids"]],
    "index_select by positions": lambda m, x, d: (
        x + m.embedding.weight.index_select(0, d["position_ids"].flatten()).view_as(x)
    ),
    "gather by positions": lambda m, x, d: (
        x + m.embedding.weight[None, :, 0].expand(BATCH, -1).gather(1, d["position_ids"])[..., None]
    ),
    "index of features": lambda m, x, d: x[..., torch.arange(WIDTH - 1, -1, -1)],
    "buckets": lambda m, x, d: x + m.embedding(torch.bucketize(d["position_ids"], torch.tensor([3, 7]))),
    "einsum of heads": lambda m, x, d: torch.einsum("bsd,bsd->bs", x, x)[..., None] * x,
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_positions_is_refused(name: str) -> None:
    with pytest.raises(ContextParallelUnsupported, match="each position of the sequence is computed by itself"):
        compile_and_run(before=MIXING[name], data={"position_ids": positions()})


@pytest.mark.parametrize("name", BESIDE)
def test_what_works_beside_positions_is_taken(name: str) -> None:
    out = compile_and_run(before=BESIDE[name], data={"position_ids": positions()})
    assert out.shape == (BATCH, LENGTH, WIDTH)


def _loss(reads: str) -> Before:
    def after(model: object, x: torch.Tensor, data: dict[str, torch.Tensor]) -> torch.Tensor:
        total = F.cross_entropy(x.flatten(0, 1), data["labels"].flatten(), reduction="sum")
        ways = {
            "scaled": lambda: total / 7,
            "two of them": lambda: total / 7 + 0.5 * total,
            "squared": lambda: total**2,
            "exponential": lambda: torch.exp(total),
            "beside weights": lambda: total + data["weight"].sum(),
            "factor of values": lambda: x * total,
            "divisor": lambda: 1 / total,
        }
        return ways[reads]()

    return after


_LABELS = {"labels": torch.randint(WIDTH, (BATCH, LENGTH)), "weight": torch.ones(2, 2)}


@pytest.mark.parametrize("reads", ["scaled", "two of them"])
def test_a_share_of_a_loss_may_be_scaled(reads: str) -> None:
    assert compile_and_run(after=_loss(reads), data=_LABELS).shape == ()


@pytest.mark.parametrize("reads", ["squared", "exponential", "beside weights", "factor of values", "divisor"])
def test_what_else_reads_a_share_of_a_loss_is_refused(reads: str) -> None:
    with pytest.raises(ContextParallelUnsupported, match="every rank has another share"):
        compile_and_run(after=_loss(reads), data=_LABELS)


def _table(**given: object) -> Before:
    return lambda m, x, d: x + F.embedding(d["position_ids"] % 5, m.embedding.weight, **given)  # type: ignore[arg-type]


#: what counts the tokens that a rank has, in a result or in a gradient
COUNTING: dict[str, Before] = {
    "gradient by frequency": _table(scale_grad_by_freq=True),
    "gradient by frequency, one row left out": _table(scale_grad_by_freq=True, padding_idx=1),
    "gradient by frequency of sparse rows": _table(scale_grad_by_freq=True, sparse=True),
    "rows that are normed where tokens read them": _table(max_norm=1.0),
    "bags": lambda m, x, d: x + F.embedding_bag(d["position_ids"] % 5, m.embedding.weight)[:, None],
    "bags by frequency": lambda m, x, d: (
        x + F.embedding_bag(d["position_ids"] % 5, m.embedding.weight, scale_grad_by_freq=True)[:, None]
    ),
    "bincount": lambda m, x, d: x * torch.bincount(d["position_ids"].flatten(), minlength=9)[0],
    "histogram": lambda m, x, d: x * torch.histc(x, 4)[0],
    "batch norm": lambda m, x, d: F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2),
    "instance norm": lambda m, x, d: F.instance_norm(x.transpose(1, 2)).transpose(1, 2),
    "norm of all": lambda m, x, d: x / x.norm(),
    "largest of all": lambda m, x, d: x / x.abs().max(),
    "sum of all": lambda m, x, d: x - x.sum(),
    "how many are positive": lambda m, x, d: x * (x > 0).sum(),
    "how many are not zero": lambda m, x, d: x * torch.count_nonzero(x),
    "mean of errors": lambda m, x, d: x * F.mse_loss(x, x.cos()),
    "scattered": lambda m, x, d: x + torch.zeros(5, WIDTH).index_add(0, d["position_ids"][0] % 5, x[0])[0],
    "one-hot, summed": lambda m, x, d: x + F.one_hot(d["position_ids"] % 5, 5).sum(1, keepdim=True)[..., :1],
}


@pytest.mark.parametrize("name", COUNTING)
def test_what_counts_the_tokens_of_a_rank_is_refused(name: str) -> None:
    with pytest.raises(ContextParallelUnsupported):
        compile_and_run(before=COUNTING[name], data={"position_ids": positions()})


@pytest.mark.parametrize("given", [{}, {"padding_idx": 1}, {"scale_grad_by_freq": False}], ids=str)
def test_a_table_is_read_for_each_position(given: dict[str, object]) -> None:
    compile_and_run(before=_table(**given), data={"position_ids": positions()})


def test_an_argument_that_no_line_names_is_named() -> None:
    with pytest.raises(ContextParallelUnsupported, match="nothing is known of what scale_grad_by_freq=True does"):
        compile_and_run(before=COUNTING["gradient by frequency"], data={"position_ids": positions()})
