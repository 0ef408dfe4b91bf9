"""A row of the table: what is found, proved and chosen of one call, on models that are made here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.hf.today.every import is_failed
from tests.hf.today.model import Call, Model, zeros
from tests.hf.today.running import NONE, PROVED, TARGETS, Row, rows

HEADS, LENGTH, WIDTH = 8, 1024, 128


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).tril()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=causal)


class Chosen(Attention):
    """Of a top k of keys for each query."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).tril()
        top = (x[:, 0] @ x[:, 0].mT).topk(64, -1).indices
        left_out = torch.ones(x.shape[0], LENGTH, LENGTH, dtype=torch.bool, device=x.device).scatter(-1, top, False)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=causal & ~left_out[:, None])


class Odd(Attention):
    """Of heads that no kernel takes and too few queries for zeros, with a softmax that nothing reads."""

    def forward(self, x: Tensor) -> Tensor:
        x = (x * self.scale)[..., :53].contiguous()
        _ = F.softmax(x @ x.mT, -1).to(torch.float32)
        return F.softmax(x[..., :4, :] @ x.mT, -1) @ x


class Left(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Broken()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class Broken(Attention):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


Broken.__name__ = "BrokenAttention"


def _inputs(model: Any) -> dict[str, Tensor]:
    return {"x": zeros(model, 4, HEADS, LENGTH, WIDTH)}


def _row(module: type[nn.Module], device: str = "meta", *, training: bool = False) -> Row:
    call = Call(name="call", inputs=_inputs, training=training)
    (row,) = rows(Model(name="model", package="torch", make=lambda _: module(), calls=(call,), device=device))
    return row


def test_a_row_has_what_each_machine_chooses() -> None:
    row = _row(Attention, training=True)
    assert (row.status, row.found, row.total) == ("ok", 1, 1)
    assert row.masks == {PROVED: 1}
    assert row.kernels.keys() == TARGETS.keys()
    assert [sum(counts.values()) for counts in row.kernels.values()] == [1] * len(TARGETS)
    assert row.slow("sm90") == 0
    assert not is_failed(row)


def test_keys_that_have_indices_are_proved() -> None:
    row = _row(Chosen)
    assert row.masks == {PROVED: 1}
    assert not row.unproved


def test_what_no_kernel_takes_is_told_with_the_reason_of_ours() -> None:
    row = _row(Odd)
    assert (row.found, row.total, row.masks) == (1, 1, {NONE: 1})
    assert row.slow("sm80") == 1
    assert any(why.startswith("sm80: untouched, since decode wants: head_dim_qk is a multiple of 8") for why in row.why)
    assert not row.misses


def test_attention_that_dynamo_leaves_to_python_is_in_the_row() -> None:
    row = _row(Left, device="cpu", training=True)
    (miss,) = row.misses
    assert miss.startswith("AC523 checkpoint: ")
    assert row.total == row.found == 0


def test_a_model_that_fails_is_a_row() -> None:
    class Failing(Attention):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no such size")

    row = _row(Failing)
    assert row.status == "error"
    assert "no such size" in row.detail
    assert is_failed(row)


@pytest.mark.parametrize(("found", "misses", "failed"), [(2, {}, False), (1, {"AC502": 1}, False), (1, {}, True)])
def test_an_attention_that_is_passed_over_fails(found: int, misses: dict[str, int], failed: bool) -> None:
    assert is_failed(Row(model="model", call="call", device="cpu", found=found, total=2, misses=misses)) == failed
