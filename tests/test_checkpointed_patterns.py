"""The spellings of attention that Inductor knows, and more, inside of a checkpoint: with gradients, and where nothing requires one.

Each is written from its formula. q, k and v are (batch, heads, positions, head dim) unless a spelling says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attn_compiler

B, H, S, D = 2, 4, 16, 32
SCALE = 1 / math.sqrt(D)
Spelling = Callable[..., Any]

SPELLINGS: dict[str, Spelling] = {}
#: which spellings get a further tensor, and which one
FURTHER: dict[str, str] = {}
#: those whose inputs are (batch, positions, heads, head dim), or have three dimensions
POSITIONS_FIRST, THREE = set[str](), set[str]()


def spelling(further: str | None = None, *, positions_first: bool = False, three: bool = False) -> Any:
    def add(function: Spelling) -> Spelling:
        name = function.__name__
        SPELLINGS[name] = function
        if further:
            FURTHER[name] = further
        (POSITIONS_FIRST if positions_first else THREE if three else set()).add(name)
        return function

    return add


@spelling()
def divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.transpose(-2, -1)) / math.sqrt(D)).softmax(-1) @ v


@spelling()
def multiplied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.matmul(q, k.transpose(-2, -1)) * SCALE).softmax(dim=-1).matmul(v)


@spelling()
def divided_dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(((q @ k.mT) / math.sqrt(D)).softmax(-1), p=0.0) @ v


@spelling()
def multiplied_not_training(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout((q @ k.mT).mul(0.4).softmax(-1), p=0.5, training=False) @ v


@spelling()
def keys_scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ (k * SCALE).mT, -1) @ v


@spelling()
def queries_scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax((q / math.sqrt(D)) @ k.mT, -1) @ v


@spelling("numbers")
def added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / math.sqrt(D) + mask, -1) @ v


@spelling("numbers")
def added_dropped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.dropout(torch.softmax(q @ k.mT * SCALE + mask, -1), 0.0, True) @ v


@spelling("truth")
def filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q / math.sqrt(D)) @ k.transpose(2, 3)
    return scores.masked_fill(~mask.expand_as(scores), -math.inf).softmax(-1) @ v


@spelling("truth")
def filled_by_zero(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT / math.sqrt(D)
    hidden = (mask.int() == 0).view(B, 1, 1, S).expand_as(scores)
    return F.softmax(scores.masked_fill(hidden, torch.finfo(scores.dtype).min), -1) @ v


@spelling("truth")
def chosen(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT * SCALE
    return torch.where(mask, scores, torch.full([], torch.finfo(q.dtype).min)).softmax(-1) @ v


@spelling()
def lower_triangle(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """And what a cache would keep."""
    seen = torch.ones(S, S, dtype=torch.bool).tril()
    scores = (q @ k.mT) / torch.full([], math.sqrt(D))
    return torch.where(seen, scores, torch.finfo(q.dtype).min).softmax(-1) @ v, k.permute(0, 2, 1, 3), v


@spelling("truth")
def lower_triangle_and_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    seen = torch.ones(S, S, dtype=torch.bool).tril()
    lowest = torch.finfo(q.dtype).min
    padding = torch.where(mask, 0.0, lowest)
    return (torch.where(seen, q @ k.mT * SCALE, lowest) + padding).clamp(min=lowest).softmax(-1) @ v


@spelling(positions_first=True)
def permuted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
    return (q @ k.permute(0, 1, 3, 2)).div(math.sqrt(D)).softmax(-1) @ v


@spelling(positions_first=True)
def permuted_dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.permute([0, 2, 1, 3]) for x in (q, k, v))
    return F.dropout((q @ k.mT).div(math.sqrt(D)).softmax(-1), 0.0) @ v


@spelling(positions_first=True)
def permuted_queries_divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.softmax((q / math.sqrt(D)) @ k.transpose(-1, -2), -1).to(q.dtype) @ v


@spelling(positions_first=True)
def permuted_in_float(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.softmax((q @ k.mT).float() / math.sqrt(D), -1, dtype=torch.float32).type_as(v) @ v


@spelling("numbers", positions_first=True)
def permuted_added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (x.permute([0, 2, 1, 3]) for x in (q, k, v))
    out = ((q @ k.mT) / math.sqrt(D) + mask).softmax(-1) @ v
    return out.permute(0, 2, 1, 3).contiguous().view(B, S, H * D)


@spelling(three=True)
def batched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)


@spelling(three=True)
def batched_dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(torch.bmm(q * SCALE, k.transpose(1, 2)).softmax(-1), 0.0) @ v


@spelling(three=True)
def joined_multiply_add(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.baddbmm(torch.zeros(1, 1, 1), q, k.mT, beta=0, alpha=SCALE).softmax(-1) @ v


@spelling("numbers")
def through_three_dimensions(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (x.reshape(B * H, S, D) for x in (q, k, v))
    scores = torch.bmm(q, k.mT).view(B, H, S, S) / math.sqrt(D) + mask
    return torch.bmm(scores.softmax(-1).view(B * H, S, S), v).view(B, H, S, D)


@spelling("bias")
def unscaled_with_a_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = q @ k.transpose(3, 2)
    scores += bias
    return F.softmax(scores.float(), -1).type_as(scores) @ v


@spelling("bias")
def unscaled_with_a_bias_and_a_cache(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return F.softmax(q @ k.mT + bias, -1) @ v, k, v


@spelling()
def unscaled_with_zeros(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.mT + torch.zeros(1, H, S, S), -1) @ v


@spelling()
def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (torch.einsum("bhqd,bhkd->bhqk", q, k) * SCALE).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


@spelling()
def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * SCALE
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (weights / weights.sum(-1, keepdim=True)) @ v


@spelling()
def weights_read_twice(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT * SCALE).softmax(-1)
    return weights @ v, weights


@spelling()
def scores_read_twice(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT
    return (scores * SCALE).softmax(-1) @ v, scores.sum()


@spelling("number")
def divided_by_a_tensor(q: Tensor, k: Tensor, v: Tensor, number: Tensor) -> Tensor:
    return (q @ k.mT / number).softmax(-1) @ v


@spelling()
def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


@spelling()
def sdpa_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@spelling("truth")
def sdpa_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def further(kind: str) -> Tensor:
    match kind:
        case "numbers":
            return torch.zeros(B, 1, 1, S).index_fill(3, torch.tensor([S - 1]), -math.inf)
        case "truth":
            return torch.arange(S).expand(B, 1, 1, S) < torch.tensor([S, S - 3]).view(B, 1, 1, 1)
        case "bias":
            return torch.randn(1, H, S, S)
        case "number":
            return torch.tensor(5.0)
    raise ValueError(kind)


def inputs(name: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    shape = (B, S, H, D) if name in POSITIONS_FIRST else (B * H, S, D) if name in THREE else (B, H, S, D)
    tensors = [torch.randn(shape, dtype=dtype) for _ in range(3)]
    return tensors if name not in FURTHER else [*tensors, further(FURTHER[name])]


def checkpointed(name: str) -> Spelling:
    def model(*tensors: Tensor) -> Any:
        # What comes before and after is no part of the checkpoint.
        return checkpoint(SPELLINGS[name], tensors[0] * 1.0, *tensors[1:], use_reentrant=False)

    return model


def assert_as_eager(name: str, given: list[Tensor], *, with_gradients: bool = False, **options: Any) -> None:
    torch._dynamo.reset()
    attn_compiler.reset()
    model = checkpointed(name)
    function = torch.compile(model, backend="attn_compiler", options={"inner": "aot_eager", "strict": True, **options})
    results = []
    for call in (function, model):
        leaves = [x.clone().requires_grad_(with_gradients and i < 3) for i, x in enumerate(given)]
        outputs = call(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if with_gradients:
            outputs = (*outputs, *torch.autograd.grad([x.square().sum() for x in outputs], leaves[:3]))
        results.append(outputs)
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
    assert attn_compiler.reports()


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", SPELLINGS)
def test_grad_mode_without_a_gradient_is_as_eager(name: str) -> None:
    """A frozen model: PyTorch looks for what to recompute all the same."""
    assert_as_eager(name, inputs(name))


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("name", SPELLINGS)
def test_with_gradients_is_as_eager(name: str) -> None:
    assert_as_eager(name, inputs(name), with_gradients=True)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", SPELLINGS)
def test_under_no_grad_is_as_eager(name: str) -> None:
    with torch.no_grad():
        assert_as_eager(name, inputs(name))


@pytest.mark.in_turns
@pytest.mark.parametrize("with_gradients", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("lowering", ["sdpa_cpu_flash", "math", "reference"])
@pytest.mark.parametrize("name", ["multiplied", "filled", "permuted", "batched", "sdpa_causal"])
def test_each_lowering_is_as_eager(name: str, lowering: str, with_gradients: bool) -> None:
    assert_as_eager(name, inputs(name), with_gradients=with_gradients, lowering=lowering)
    (report,) = attn_compiler.reports()
    assert [site.decision.lowering for site in report.sites] == [lowering]


@pytest.mark.in_turns
@pytest.mark.parametrize("with_gradients", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("name", ["divided", "lower_triangle", "sdpa_masked"])
def test_as_inductor_compiles_it(name: str, with_gradients: bool) -> None:
    assert_as_eager(name, inputs(name), with_gradients=with_gradients, inner="inductor")


def test_dropout_without_a_gradient_drops() -> None:
    """Which Inductor alone refuses to compile there: nothing is recomputed, so nothing has to be drawn twice."""

    def drop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout((q @ k.mT * SCALE).softmax(-1), 0.5) @ torch.ones_like(v)

    def model(*tensors: Tensor) -> Any:
        return checkpoint(drop, *tensors, use_reentrant=False)

    torch._dynamo.reset()
    torch.manual_seed(0)
    function = torch.compile(model, backend="attn_compiler", options={"inner": "aot_eager", "strict": True})
    out = function(*inputs("divided"))
    assert 0.9 < float(out.mean()) < 1.1
    assert float(out.std()) > 0.1


def test_what_a_backward_in_the_graph_needs_is_recomputed_as_before() -> None:
    """Only where Dynamo is told to trace torch.autograd.grad: there AOTAutograd has to look."""

    def step(*tensors: Tensor) -> Any:
        out = checkpoint(SPELLINGS["divided"], *tensors, use_reentrant=False)
        return torch.autograd.grad(out.square().sum(), tensors)

    torch._dynamo.reset()
    given = [x.requires_grad_() for x in inputs("divided")]
    options = {"inner": "aot_eager", "strict": True, "lowering": "math"}
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        found = torch.compile(step, backend="attn_compiler", options=options, fullgraph=True)(*given)
    torch.testing.assert_close(found, step(*given), atol=1e-4, rtol=1e-4)
