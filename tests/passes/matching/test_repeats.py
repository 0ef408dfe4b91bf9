"""Layers that share one body (`torch.compiler.nested_compile_region`): each is found, counted and named, and its mask is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_compiler import Fp8Recipe
from tests.passes.compiling import CPU_FLASH, Compiled, compiled

LAYERS, DIM, HEADS, S = 3, 16, 2, 10


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.attention(x, mask)


def causal(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


class Model(nn.Module):
    """Every layer's mask is the same tensor, or (`windowed`) each second one's lets fewer keys through."""

    def __init__(self, *, windowed: bool = False) -> None:
        super().__init__()
        self.windowed = windowed
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        mask = causal(x)[None, None] & keep[:, None, None, :]
        near = mask & causal(x).mT.tril(3) if self.windowed else mask
        for i, layer in enumerate(self.layers):
            x = layer(x, near if i % 2 else mask)
        return x


def _inputs() -> tuple[Tensor, Tensor]:
    keep = torch.ones(2, S, dtype=torch.bool)
    keep[0, 7:] = False
    return torch.randn(2, S, DIM, generator=torch.Generator().manual_seed(0)), keep


def _run(model: nn.Module, *, grad: bool, **options: Any) -> Compiled:
    """Equal to eager, with its gradients."""
    # PyTorch differentiates a region only where AOTAutograd has traced it.
    run = compiled(model, lowerings=["sdpa_cpu_flash"], inner="aot_eager", **options)
    with torch.set_grad_enabled(grad):
        got, wanted = run(*_inputs()), model(*_inputs())
    torch.testing.assert_close(got, wanted)
    if grad:
        pairs = zip(*(torch.autograd.grad(x.sin().sum(), list(model.parameters())) for x in (got, wanted)), strict=True)
        for mine, right in pairs:
            torch.testing.assert_close(mine, right, atol=1e-5, rtol=1e-4)
    return run


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_every_layer_of_a_shared_body_is_a_site_with_its_mask(grad: bool) -> None:
    torch.manual_seed(0)
    report = _run(Model(), grad=grad).report
    assert report.num_sites == LAYERS
    assert not report.misses
    names = sorted(name for site in report.sites for name in site.modules)
    assert names == [f"layers.{i}.attention" for i in range(LAYERS)]
    for site in report.sites:
        assert site.spec.mask.words.startswith("causal ∧ key padding keep[b, k] (proved)")
        assert site.decision.lowering == "sdpa_cpu_flash"
        assert site.spec.needs_grad == grad


def test_layers_whose_masks_differ_get_them_as_they_are() -> None:
    """One body serves both masks, so neither of the two is known in it."""
    torch.manual_seed(0)
    report = _run(Model(windowed=True), grad=False).report
    assert report.num_sites == LAYERS
    for site in report.sites:
        assert site.spec.mask.dense is not None
        assert not site.spec.mask.kinds


def test_a_region_that_is_a_function_is_counted_by_its_calls() -> None:
    @torch.compiler.nested_compile_region
    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    run = compiled(lambda q: attend(attend(attend(q))), lowerings=["sdpa_cpu_flash"])
    q = torch.randn(2, 2, S, 8)
    wanted = q
    for _ in range(3):
        wanted = F.scaled_dot_product_attention(wanted, wanted, wanted, is_causal=True)
    torch.testing.assert_close(run(q), wanted)
    assert run.report.num_sites == 3
    assert len(run.report.sites) == 1
    assert run.graphs[0].calls.count(CPU_FLASH) <= 1


def test_a_region_in_a_region() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        @torch.compiler.nested_compile_region
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, mask)
            return x

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, causal(x))
            return x

    torch.manual_seed(0)
    report = _run(Nested(), grad=False).report
    names = sorted(name for site in report.sites for name in site.modules)
    assert names == [f"blocks.{i}.layers.{j}.attention" for i in range(2) for j in range(2)]
    assert all("causal" in site.spec.mask.words for site in report.sites)


def test_a_miss_in_a_shared_body_is_counted_by_its_calls() -> None:
    @torch.compiler.nested_compile_region
    def attend(q: Tensor) -> Tensor:
        scores = q @ torch.transpose(q + 1, -1, -2)
        return (scores.softmax(-1) * scores) @ q

    run = compiled(lambda q: attend(attend(q)))
    run(torch.randn(2, 2, S, 8))
    (miss,) = run.report.misses
    assert len(miss.modules) == 2


@pytest.mark.parametrize("pattern", ["layers.0.*", "layers.1.*"])
def test_layers_that_share_a_body_are_excluded_from_fp8_together(pattern: str) -> None:
    torch.manual_seed(0)
    (site,) = _run(Model(), grad=False, fp8_recipe=Fp8Recipe(exclude=(pattern,))).report.sites
    assert len(site.modules) == LAYERS
    assert site.spec.fp8 is None
    assert any(f"excluded by the pattern {pattern!r}" in note for note in site.notes)
