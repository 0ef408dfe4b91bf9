"""Pipelines of diffusers whose denoiser is compiled: one graph for all steps, and eager's images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attn_compiler
from tests.hf.packages import Unavailable, import_package
from tests.integrations import launching
from tests.integrations.launching import found

_SETTINGS = {"backend": "attn_compiler", "options": {"inner": "eager", "strict": True}}
_SIZE = {"num_inference_steps": 3, "height": 16, "width": 16, "output_type": "np"}  # as in the recipe


@pytest.fixture
def pipe() -> Any:
    """A tiny Flux."""
    try:
        return _flux(import_package("diffusers"))
    except Unavailable as missing:
        pytest.skip(str(missing))


def _vae(diffusers: Any, **config: Any) -> Any:
    shape = {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",)}
    sizes = {"block_out_channels": (8,), "latent_channels": 4, "norm_num_groups": 4}
    return diffusers.AutoencoderKL(in_channels=3, out_channels=3, **shape, **sizes, **config).eval()


def _flux(diffusers: Any) -> Any:
    torch.manual_seed(0)
    widths = {"attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": [4, 4, 8]}
    texts = {"joint_attention_dim": 32, "pooled_projection_dim": 32}
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, **widths, **texts
    )
    vae = _vae(diffusers, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06, scaling_factor=1.5)
    no_text = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = diffusers.FluxPipeline(transformer=transformer.eval(), vae=vae, scheduler=scheduler, **no_text)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _prompt() -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(1)
    return {
        "prompt_embeds": torch.randn(1, 7, 32, generator=noise),
        "pooled_prompt_embeds": torch.randn(1, 32, generator=noise),
    }


def _images(pipe: Any) -> Any:
    torch.manual_seed(2)
    return pipe(**_prompt(), **_SIZE).images


@pytest.mark.usefixtures("quick")
def test_one_graph_for_all_steps(pipe: Any) -> None:
    eager = _images(pipe)
    torch.manual_seed(2)
    given = launching.run("diffusers", pipe=pipe, **_prompt())
    np.testing.assert_allclose(given["images"], eager, rtol=1e-4, atol=1e-5)
    assert found(sites=4) == ["71: none"]
    (site,) = attn_compiler.reports()[0].sites
    assert site.modules[:3:2] == ("transformer_blocks.0.attn", "single_transformer_blocks.0.attn")
    assert len(attn_compiler.reports()) == 1


def test_blocks_of_a_sort_share_a_graph(pipe: Any) -> None:
    eager = _images(pipe)
    pipe.transformer.compile_repeated_blocks(**_SETTINGS)
    np.testing.assert_allclose(_images(pipe), eager, rtol=1e-4, atol=1e-5)
    assert set(found(sites=1)) == {"71: none"}
    blocks = pipe.transformer.transformer_blocks, pipe.transformer.single_transformer_blocks
    assert len(attn_compiler.reports()) < sum(len(sort) for sort in blocks)


def test_the_decoder(pipe: Any) -> None:
    eager = _images(pipe)
    pipe.vae.decode = torch.compile(pipe.vae.decode, **_SETTINGS)
    np.testing.assert_allclose(_images(pipe), eager, rtol=1e-4, atol=1e-5)
    assert found(sites=1) == ["256: none"]
