"""Added tensors that can mask nothing are known to, and those that may mask are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attn_compiler
from attn_compiler.options.options import Options
from attn_compiler.passes.writing.select import decide
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.masks import MaskSpec
from attn_compiler.spec.target import Target
from tests.near_miss.checking import assert_same, normal

B, H, S, D = 2, 2, 4, 8
#: queries and keys of a window
N = 64
#: from the queries and a table of numbers to what is added
Make = Callable[[Tensor, Tensor], Tensor]


def mask_of(make: Make) -> MaskSpec:
    """The mask of an attention that make's tensor is added to, whose outputs and gradients are eager's."""

    def function(q: Tensor, k: Tensor, table: Tensor) -> Tensor:
        return F.softmax(q * 0.5 @ k.mT + make(q, table), -1) @ k

    def inputs() -> list[Tensor]:
        return [normal(B, H, S, D, grad=True), normal(B, H, S, D, grad=True, seed=1), normal(S, D, grad=True, seed=2)]

    assert_same(function, inputs)
    ((site,),) = (report.sites for report in attn_compiler.reports())
    return site.spec.mask


def _square(table: Tensor) -> Tensor:
    return table[:, :S]


def _far(q: Tensor, table: Tensor) -> Tensor:
    return torch.einsum("bhqd,kd->bhqk", q, table)


class _Shifted(nn.Module):
    """Attention of Transformer-XL: products with positions are shifted by a number more in each row, for which they lie otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(torch.randn(H, D)), nn.Parameter(torch.randn(H, D))

    def forward(self, q: Tensor, k: Tensor, positions: Tensor, around: float) -> Tensor:
        far = (q + self.v.view(1, H, 1, D)) @ positions.mT
        far = F.pad(far, (1, 0), value=around)
        far = far.view(*far.shape[:2], far.shape[3], far.shape[2])[:, :, 1:].reshape(*q.shape[:3], -1)
        return F.scaled_dot_product_attention(q + self.u.view(1, H, 1, D), k, k, attn_mask=far[..., : k.shape[2]])


class _ShiftedTwice(_Shifted):
    """The same with zeros joined, and with each shape said (Wav2Vec2-Conformer, FastSpeech 2)."""

    def forward(self, q: Tensor, k: Tensor, positions: Tensor, around: float) -> Tensor:
        q = q.transpose(1, 2)
        far = (q + self.v).transpose(1, 2) @ positions.mT
        wide = torch.cat([torch.full((*far.shape[:3], 1), around), far], -1)
        far = wide.view(*far.shape[:2], far.shape[3] + 1, far.shape[2])[:, :, 1:].view_as(far)
        far = far[..., : k.shape[2]] * 0.5
        return F.scaled_dot_product_attention((q + self.u[None, None]).transpose(1, 2), k, k, attn_mask=far)


@pytest.mark.parametrize("shifting", [_Shifted, _ShiftedTwice])
@pytest.mark.parametrize(("around", "may_mask"), [(0.0, False), (-1e9, True)])
def test_a_shift_that_can_not_be_read_moves_what_is_no_mask(
    around: float, may_mask: bool, shifting: type[_Shifted]
) -> None:
    model = shifting()
    compiled = torch.compile(model, backend="attn_compiler", options={"inner": "aot_eager"})
    for length in (6, 9):
        given = normal(B, H, length, D), normal(B, H, length, D, seed=1), normal(2 * length - 1, D, seed=2)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*given, around), model(*given, around), atol=1e-5, rtol=1e-5)
    ((site,),) = (report.sites for report in attn_compiler.reports()[-1:])
    assert ("may mask" in f"{site.spec.mask.reason} {site.spec.mask.added}") is may_mask


NO_MASKS: dict[str, Make] = {
    "Swin v2's": lambda q, table: 16 * torch.sigmoid(_square(table)),
    "a tangent": lambda q, table: torch.tanh(_square(table)) * -50.0,
    "weights of another softmax": lambda q, table: F.softmax(_square(table), -1),
    "SAM's": _far,
    "SAM's, of a head at a time": lambda q, table: (q.flatten(0, 1) @ table.mT).view(B, H, S, S),
    "two of them": lambda q, table: _far(q, table) + torch.sigmoid(_square(table)),
}

#: what of it may mask
MASKS: dict[str, Make] = {
    "a gate that masks": lambda q, table: torch.sigmoid(_square(table)) * -1e5,
    "a product that masks": lambda q, table: _far(q, table) * 1e5,
    "a product of no query": lambda q, table: table @ table.mT,
    "a product of what the queries were made to": lambda q, table: torch.einsum("bhqd,kd->bhqk", q.exp(), table),
    "a product on something else": lambda q, table: torch.addmm(table @ table.mT, q[0, 0], table.mT),
    "no bound": lambda q, table: F.softplus(_square(table)),
    "written to behind": lambda q, table: torch.sigmoid(_square(table.detach())).logit_(),
    "beside another": lambda q, table: torch.sigmoid(_square(table)) + F.softplus(_square(table)),
}


@pytest.mark.parametrize("name", NO_MASKS)
def test_no_masks(name: str) -> None:
    mask = mask_of(NO_MASKS[name])
    assert not mask.kinds
    assert mask.reason is None


@pytest.mark.parametrize("name", MASKS)
def test_what_may_mask(name: str) -> None:
    assert "it may mask too" in str(mask_of(MASKS[name]).reason)


class Learned(nn.Module):
    """Training with a bias for each head and pair, beside a padding mask or alone."""

    def __init__(self, bias: str, padded: bool) -> None:
        super().__init__()
        self.qkv, self.pairs = nn.Linear(32, 96), nn.Linear(16, 2)
        self.table, self.keys = nn.Parameter(torch.randn(2, N, N)), nn.Parameter(torch.randn(2, N, 16))
        self.bias, self.padded = bias, padded

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        pairs = x.view(-1, N, 2, 16)[:, :, 0]
        biases = {
            "parameter": lambda: self.table,
            "linear layer": lambda: self.pairs(pairs[:1, None].expand(1, N, N, 16)).permute(0, 3, 1, 2),
            "product with a parameter": lambda: torch.einsum("bqd,hkd->bhqk", pairs, self.keys),
            "input": lambda: (pairs[:1] @ pairs[:1].mT)[:, None],
            "made to mask": lambda: self.table * -1e9,
        }
        scores = q * 0.25 @ k.mT + biases[self.bias]()
        if self.padded:
            scores = scores.masked_fill(~kept[:, None, None], -torch.inf)
        return scores.softmax(-1) @ v


def _spec(bias: str, padded: bool) -> AttentionSpec:
    attn_compiler.reset()
    options = {"inner": "eager", "cache_rewrites": False}
    compiled = torch.compile(Learned(bias, padded).bfloat16().to("meta"), backend="attn_compiler", options=options)
    with torch.device("meta"):
        compiled(torch.empty(512, N, 32, dtype=torch.bfloat16), torch.ones(512, N, dtype=torch.bool))
    ((site,),) = (report.sites for report in attn_compiler.reports())
    return site.spec


@pytest.mark.parametrize("bias", ["parameter", "linear layer", "product with a parameter"])
def test_a_learned_bias_has_one_answer_with_and_without_a_mask(bias: str) -> None:
    for spec in (_spec(bias, padded) for padded in (False, True)):
        assert not spec.adds_unread
        for sm in (80, 89, 90, 100):
            decision = decide(dataclasses.replace(spec, device="cuda"), Target.fake(sm=sm), Options())
            assert decision.lowering in ("triton", "sdpa_efficient")


@pytest.mark.parametrize("bias", ["input", "made to mask"])
def test_what_may_mask_may_do_so_beside_a_mask_too(bias: str) -> None:
    assert [_spec(bias, padded).adds_unread for padded in (False, True)] == [True, True]


def test_rows_that_an_input_shuts_out_beside_padding_get_their_own_gradient() -> None:
    """An lse in float32 can not hold the logarithm of how many keys there are beside -1e9."""

    def function(q: Tensor, k: Tensor, bias: Tensor, kept: Tensor) -> Tensor:
        scores = (q * 0.5 @ k.mT + bias).masked_fill(~kept[:, None, None], -torch.inf)
        return F.softmax(scores, -1) @ k

    def inputs() -> list[Tensor]:
        bias, kept = normal(1, 1, 300, 300), torch.ones(B, 300, dtype=torch.bool)
        bias[..., 5, :], kept[1, 150:] = -1e9, False
        return [*(normal(B, H, 300, D, grad=True, seed=seed) for seed in (0, 1)), bias, kept]

    assert_same(function, inputs)
