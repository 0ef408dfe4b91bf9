"""Attention of nested tensors is a miss by name, whether Dynamo has the call in its graph or ends the graph there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_compiler.reasons.codes import Code
from attn_compiler.reporting.facts import MissReport
from tests.passes.compiling import compiled

WIDTH, HEADS = 16, 2


def jagged(*lengths: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, WIDTH, generator=generator) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def heads(x: Tensor, count: int = HEADS) -> Tensor:
    return x.contiguous().unflatten(-1, [count, -1]).transpose(1, 2)


def flat(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(-2)


class Model(nn.Module):
    """attend: what the model does between its projections."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend = attend
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        return self.out(flat(self.attend(heads(q), heads(k), heads(v))))


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=0.3)


def with_no_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query=q, key=k, value=v, dropout_p=0.0)


def over_lines(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q * 2, k, v)


def its_own_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, q)


def squared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v) * 2


def of_halves(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sdpa = F.scaled_dot_product_attention
    return sdpa(q, k, v)


def normed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(torch.nn.functional.silu(q), k, v)


ATTEND = (plain, scaled, with_no_dropout, over_lines, its_own_values, squared, of_halves, normed)


def misses_of(model: Any, *given: Tensor) -> list[MissReport]:
    run = compiled(model)
    found, expected = run(*given), model(*given)
    if found.is_nested:
        found, expected = found.values(), expected.values()
    torch.testing.assert_close(found, expected)
    return [miss for report in run.reports for miss in report.misses]


def is_told(miss: MissReport) -> bool:
    told = str(miss.reason)
    return miss.reason.code is Code.CLOSED_TENSOR and "nested tensor" in told and "varlen_attn" in told


@pytest.mark.parametrize("attend", ATTEND, ids=lambda f: f.__name__)
def test_the_call_that_ends_the_graph_is_told(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """A function that Dynamo ends within is compiled by itself then, so its call may be told of two graphs."""
    found = misses_of(Model(attend), jagged(5, 7))
    assert all(map(is_told, found))
    (source,) = {miss.source for miss in found}
    assert str(source).startswith("test_nested_calls.py:")


def test_without_gradients() -> None:
    with torch.no_grad():
        (miss,) = misses_of(Model(plain), jagged(5, 7, 2))
    assert is_told(miss)


def test_each_layer_s_call_is_told() -> None:
    first, second = Model(plain), Model(scaled)
    found = misses_of(lambda x: second(first(x)), jagged(5, 7))
    assert len(found) == 2
    assert all(map(is_told, found))


def test_a_nested_tensor_that_the_model_makes() -> None:
    model = Model(plain)

    def run(values: Tensor, offsets: Tensor) -> Tensor:
        return model(torch.nested.nested_tensor_from_jagged(values, offsets) * 1).values()

    found = misses_of(run, torch.randn(12, WIDTH), torch.tensor([0, 5, 12]))
    assert found
    assert all(map(is_told, found))


def test_a_call_within_the_graph_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, Dynamo traces the call. Here something that it can trace stands in for what PyTorch does in it."""
    from torch.nested._internal import ops

    monkeypatch.setattr(ops, "jagged_scaled_dot_product_attention", lambda q, k, v, **_: q * 1 + k + v)
    (miss,) = misses_of(Model(plain), jagged(5, 7))
    assert is_told(miss)
    assert miss.reason.observed == "query is a nested tensor"


# ---- near misses ------------------------------------------------------------------------------------------------------


def broken_off_elsewhere(x: Tensor) -> Tensor:
    x = x * 2
    torch._dynamo.graph_break()
    return x + 1


def no_attention(x: Tensor) -> Tensor:
    return F.gelu(x) * 2


def values_of(x: Tensor) -> Tensor:
    return (x * 2).values().cumsum(0)


@pytest.mark.parametrize("function", [broken_off_elsewhere, no_attention, values_of], ids=lambda f: f.__name__)
def test_what_is_no_attention_is_not_told(function: Callable[[Tensor], Tensor]) -> None:
    assert misses_of(function, jagged(5, 7)) == []


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def attention_that_is_kept_out(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def test_a_graph_that_ends_at_an_attention_of_plain_tensors_is_no_matter_of_nested_ones() -> None:
    (miss,) = misses_of(lambda x: attention_that_is_kept_out(x * 2) + 1, torch.randn(2, 2, 5, 8))
    assert miss.reason.code == Code.LEFT_TO_PYTHON
