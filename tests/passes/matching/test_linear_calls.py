"""Layers of linear attention are told as misses, by the function or the module that computes them; what only has such a name is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_compiler.passes.matching.linear_calls import RECURRENCES
from attn_compiler.reasons.codes import Code
from attn_compiler.reporting.facts import MissReport
from tests.passes.compiling import compiled

B, H, S, D = 1, 2, 6, 4


def misses_of(model: Callable[..., Any]) -> list[MissReport]:
    q = torch.randn(B, H, S, D)
    run = compiled(model)
    torch.testing.assert_close(run(q), model(q))
    return [miss for report in run.reports for miss in report.misses]


# ---- functions of these names, each of a few ops ----------------------------------------------------------------------


def torch_chunk_gated_delta_rule(q: Tensor, decay: Tensor) -> Tensor:
    state, out = q.new_zeros(B, H, D, D), []
    for i in range(S):
        state = state * decay + q[:, :, i, :, None] * (q[:, :, i] - (state @ q[:, :, i, :, None])[..., 0])[..., None, :]
        out.append((q[:, :, i, None] @ state)[:, :, 0])
    return torch.stack(out, 2)


def fused_recurrent_gated_delta_rule(q: Tensor, decay: Tensor) -> Tensor:
    return q[:, :, :1] @ (q.mT @ q * decay)


def chunk_kimi_delta_attention(q: Tensor, decay: Tensor) -> Tensor:
    return q @ (q.mT * decay @ q)


def chunk_kda(q: Tensor, decay: Tensor) -> Tensor:
    return (q * decay) @ (q.mT @ q)


def mamba2_chunk_scan(q: Tensor, decay: Tensor) -> Tensor:
    return torch.einsum("bhsd,bhsp,bhtp->bhtd", q, q * decay, q)


def mamba2_selective_state_update(q: Tensor, decay: Tensor) -> Tensor:
    return q * decay + q.sum(2, keepdim=True)


def mamba_selective_scan(q: Tensor, decay: Tensor) -> Tensor:
    return (q * decay).cumsum(2)


def lightning_attn_func(q: Tensor, decay: Tensor) -> Tensor:
    return (q @ q.mT).tril() @ q * decay


def rwkv_linear_attention_cpu(q: Tensor, decay: Tensor) -> Tensor:
    return (q.exp() * q).cumsum(2) / q.exp().cumsum(2) * decay


def parallel_retention(q: Tensor, decay: Tensor) -> Tensor:
    return (q @ q.mT * decay).tril() @ q


def causal_linear_attention(q: Tensor, decay: Tensor) -> Tensor:
    return (F.elu(q) + 1) @ ((F.elu(q) + 1).mT @ q) * decay


FUNCTIONS = (
    torch_chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    chunk_kimi_delta_attention,
    chunk_kda,
    mamba2_chunk_scan,
    mamba2_selective_state_update,
    mamba_selective_scan,
    lightning_attn_func,
    rwkv_linear_attention_cpu,
    parallel_retention,
    causal_linear_attention,
)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_a_function_is_told_once_for_all_of_its_ops(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    (miss,) = misses_of(lambda q: function(q, torch.ones(())) + 1)
    assert (miss.anchor, miss.reason.code, len(miss.modules)) == (function.__name__, Code.LINEAR_ATTENTION, 1)
    assert function.__name__ in miss.reason.observed
    assert str(miss.source).startswith("test_linear_calls.py:")


def test_layers_are_one_row_beside_the_attention_of_others() -> None:
    class Linear(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return torch_chunk_gated_delta_rule(q, torch.ones(()))

    class Attention(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    model = nn.Sequential(Linear(), Linear(), Attention(), Linear())
    run = compiled(model)
    run(torch.randn(B, H, S, D))
    (miss,) = run.report.misses
    assert (run.report.num_sites, run.report.num_misses) == (1, 3)
    assert miss.modules == ("0", "1", "3")
    assert "flash-linear-attention" in str(miss.reason.remedy)
    assert "AC522" in str(run.report)


# ---- modules ----------------------------------------------------------------------------------------------------------


class _Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) @ (self.k(x).mT @ x)


def _named(name: str, base: type[nn.Module] = _Mixing) -> nn.Module:
    return nn.Sequential(type(name, (base,), {})(), nn.Identity())


@pytest.mark.parametrize(
    "name",
    "TinyGatedDeltaNet KimiDeltaAttention TinyMamba2Mixer BambaMixer TinyMambaMixer MiniMaxLightningAttention RwkvSelfAttention "
    "MultiScaleRetention LinearAttention SanaLinearAttention LinearSelfAttention LinearAttn".split(),
)
def test_a_module_is_told_by_its_class(name: str) -> None:
    (miss,) = misses_of(_named(name))
    assert (miss.anchor, miss.reason.code) == (name, Code.LINEAR_ATTENTION)


def test_a_module_whose_function_is_told_is_not_told_again() -> None:
    class Calling(_Mixing):
        def forward(self, x: Tensor) -> Tensor:
            return chunk_kda(super().forward(x), torch.ones(()))

    (miss,) = misses_of(_named("TinyGatedDeltaNet", Calling))
    assert miss.anchor == "chunk_kda"


# ---- near misses ------------------------------------------------------------------------------------------------------


def update_linear_attn_mask(q: Tensor) -> Tensor:
    return q.cumsum(-1)


def gated_mlp(q: Tensor) -> Tensor:
    return F.silu(q) * q


def two_products(q: Tensor) -> Tensor:
    return q @ (q.mT @ q)


@pytest.mark.parametrize("function", [update_linear_attn_mask, gated_mlp, two_products], ids=lambda f: f.__name__)
def test_other_functions_are_not_told(function: Callable[[Tensor], Tensor]) -> None:
    assert misses_of(lambda q: function(q) * 1) == []


class _Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class _PositionWise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x @ self.weight)


@pytest.mark.parametrize("base", [_Softmax, _PositionWise])
def test_a_module_that_only_has_such_a_name_is_not_told(base: type[nn.Module]) -> None:
    assert misses_of(_named("LinearAttention", base)) == []


@pytest.mark.parametrize("name", ["LinearLayer", "AttentionLinear", "RetentionPolicy", "MambaNorm"])
def test_other_modules_are_not_told(name: str) -> None:
    assert misses_of(_named(name)) == []


def test_each_recurrence_has_a_name_of_its_own() -> None:
    assert len({one.name for one in RECURRENCES}) == len(RECURRENCES)
