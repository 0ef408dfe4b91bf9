"""Denoisers whose prompt is empty in one row of the batch, as classifier-free guidance gives it: outputs and gradients are eager's."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn_compiler
from tests.hf.packages import Unavailable, import_package

BATCH, WORDS, WIDTH = 3, 6, 16


def _import(name: str) -> Any:
    try:
        return import_package(name)
    except Unavailable as missing:
        pytest.skip(str(missing))


def _prompt(width: int) -> dict[str, Tensor]:
    """The second row's prompt is empty, and half of the third's is padding."""
    words = torch.randn(BATCH, WORDS, width, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(BATCH, WORDS)
    mask[1], mask[2, 3:] = 0, 0
    return {"encoder_hidden_states": words, "encoder_attention_mask": mask}


def _image(*shape: int) -> dict[str, Tensor]:
    noise = torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(2))
    return {"hidden_states": noise, "timestep": torch.tensor([1, 5, 9])}


def pixart(diffusers: Any) -> tuple[Any, dict[str, Any]]:
    model = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        cross_attention_dim=16,
        sample_size=8,
        patch_size=2,
        caption_channels=WIDTH,
        use_additional_conditions=False,
    )
    sizes = {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
    return model, {**_image(4, 8, 8), **_prompt(WIDTH), **sizes}


def sana(diffusers: Any) -> tuple[Any, dict[str, Any]]:
    model = diffusers.SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=WIDTH,
        sample_size=8,
        patch_size=1,
    )
    return model, {**_image(4, 8, 8), **_prompt(WIDTH)}


def ltx(diffusers: Any) -> tuple[Any, dict[str, Any]]:
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=2,
        caption_channels=WIDTH,
    )
    return model, {**_image(16, 4), **_prompt(WIDTH), "num_frames": 1, "height": 4, "width": 4}


def stable_diffusion(diffusers: Any) -> tuple[Any, dict[str, Any]]:
    model = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=WIDTH,
        attention_head_dim=2,
        norm_num_groups=4,
    )
    image = _image(4, 8, 8)
    return model, {"sample": image["hidden_states"], "timestep": image["timestep"], **_prompt(WIDTH)}


def _write_out(diffusers: Any, model: Any) -> int:
    """Attention by products and a softmax, where the model has a processor that does that: at how many places."""
    processor = diffusers.models.attention_processor.AttnProcessor
    found = [m for m in model.modules() if type(getattr(m, "processor", None)).__name__ == "AttnProcessor2_0"]
    for module in found:
        module.set_processor(processor())
    return len(found)


def _found(model: Any, run: Callable[..., Any], inputs: dict[str, Any]) -> list[Tensor]:
    model.zero_grad()
    out = run(**inputs)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)).sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def _widened(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in inputs.items()}


class Prompted(nn.Module):
    """The mask becomes what is added to scores within the graph: of the lowest number, where the model's own way is -10000."""

    def __init__(self, model: nn.Module, *, lowest: bool) -> None:
        super().__init__()
        self.model, self.lowest = model, lowest

    def forward(self, encoder_attention_mask: Tensor, **others: Any) -> Tensor:
        dtype = others["encoder_hidden_states"].dtype
        mask = encoder_attention_mask.to(dtype)
        if self.lowest:
            mask = torch.zeros_like(mask).masked_fill(encoder_attention_mask == 0, torch.finfo(dtype).min)[:, None]
        out: Tensor = self.model(encoder_attention_mask=mask, **others, return_dict=False)[0]
        return out


@pytest.mark.in_turns(8)
@pytest.mark.parametrize(
    ("build", "kind", "lowest"),
    # Sana and LTX have no processor that is written out. Stable Diffusion's UNet makes its own numbers of whatever mask it is given.
    [
        *((build, "sdpa", lowest) for build in (pixart, sana, ltx) for lowest in (False, True)),
        *((pixart, "eager", lowest) for lowest in (False, True)),
        *((stable_diffusion, kind, False) for kind in ("sdpa", "eager")),
    ],
    ids=lambda x: ("-10000", "lowest")[x] if isinstance(x, bool) else x if isinstance(x, str) else x.__name__,
)
def test_an_empty_prompt_is_eagers(build: Callable[[Any], tuple[Any, dict[str, Any]]], kind: str, lowest: bool) -> None:
    diffusers = _import("diffusers")
    torch.manual_seed(0)
    own_model, inputs = build(diffusers)
    for parameter in own_model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    if kind == "eager":
        assert _write_out(diffusers, own_model) > 0
    model = Prompted(own_model.train(), lowest=lowest)
    torch._dynamo.reset()
    attn_compiler.reset()
    run = torch.compile(model, backend="attn_compiler", options={"inner": "aot_eager", "strict": True})
    found = _found(model, run, inputs)
    # SDPA's kernel for CPUs has no gradient in rows that the lowest number masks.
    with sdpa_kernel(SDPBackend.MATH) if lowest else contextlib.nullcontext():
        eager = _found(model, model, inputs)
    wide = copy.deepcopy(model).double()
    with sdpa_kernel(SDPBackend.MATH):
        exact = _found(wide, wide, _widened(inputs))
    reports = attn_compiler.reports()
    assert reports.num_sites > 0
    assert ("softmax chain" in {site.pattern for report in reports for site in report.sites}) is (kind == "eager")
    for ours, own, true in zip(found, eager, exact, strict=True):
        size = max(1.0, float(true.abs().max()))
        off, allowed = ours.double() - true, own.double() - true
        assert float(off.abs().max()) <= 2 * float(allowed.abs().max()) + 2e-5 * size
