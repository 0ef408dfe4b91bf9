from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.fp8_recipe import CurrentScaling, DelayedScaling, Fp8Recipe, StaticScaling
from attn_compiler.lowerings import fp8_quantise, fp8_rounding
from attn_compiler.lowerings.base import Operands
from tests.lowerings.fp8_problems import Eager
from tests.lowerings.specs import make_spec

B, H, HKV, S, D = 2, 4, 2, 300, 32
BLOCKS = Fp8Recipe(scaling=CurrentScaling(granularity="block"))


def tensors(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (B, H, S, D), "k": (B, HKV, S, D), "v": (B, HKV, S, D)}
    return {name: torch.randn(shape, generator=generator).to(dtype).requires_grad_() for name, shape in shapes.items()}


def rounded(
    given: dict[str, Tensor], recipe: Fp8Recipe, emitter: Eager | None = None, *, restored: bool = True, **spec: Any
) -> tuple[fp8_quantise.Rounded, dict[str, Tensor]]:
    described = make_spec(batch=B, heads=H, heads_kv=HKV, seqlen_q=S, seqlen_kv=S, head_dim=D, **spec)
    asked: Any = emitter or Eager()
    nodes: Any = given
    with_recipe = dataclasses.replace(described, fp8=recipe)
    made: Any = fp8_quantise.emit(asked, with_recipe, Operands(**nodes), restored=restored)
    names = fp8_quantise.names(with_recipe)
    return made, dict(zip(names, made.operands, strict=True))


def restored(found: dict[str, Tensor], name: str) -> Tensor:
    x = found[f"{name}8"].float()
    x = fp8_rounding.in_order(x).transpose(2, 3)[:, :, :S] if name == "v" else x
    descale = found[f"descale_{name}"]
    return x * (descale if descale.shape[2] == 1 else descale.repeat_interleave(128, -1)[..., :S])[..., None]


SHAPES = {
    "tensor": (1, 1, 1),
    "head": (B, H, 1),
    "block": (B, H, 3),
}


@pytest.mark.parametrize("granularity", SHAPES)
@pytest.mark.parametrize(("form", "dtype", "bits"), [("e4m3", torch.float8_e4m3fn, 4), ("e5m2", torch.float8_e5m2, 3)])
def test_each_number_is_rounded_and_the_largest_is_the_formats(
    granularity: Any, form: Any, dtype: torch.dtype, bits: int
) -> None:
    given = tensors()
    recipe = Fp8Recipe(scaling=CurrentScaling(granularity=granularity), forward_format=form)
    _, found = rounded(given, recipe)
    assert found["descale_q"].shape == SHAPES[granularity]
    assert {found[f"{x}8"].dtype for x in "qkv"} == {dtype}
    assert float(found["q8"].float().abs().max()) == recipe.largest_of("q")
    for name in "qkv":
        x = given[name].float()
        error = (restored(found, name) - x).abs()
        # Half a unit in the last place, and of the smallest number.
        assert bool((error <= x.abs() * 2.0**-bits + x.abs().max() / recipe.largest_of(name) * 2.0**-9).all())


def test_q_and_k_as_whole_numbers() -> None:
    given = tensors()
    with torch.no_grad():
        given["q"][0, 0, 0, 0] = torch.nan
    _, found = rounded(given, Fp8Recipe(qk_format="int8"))
    assert [found[f"{x}8"].dtype for x in "qkv"] == [torch.int8, torch.int8, torch.float8_e4m3fn]
    assert int(found["k8"].abs().max()) == 127
    assert int(found["q8"][0, 0, 0, 0]) == 0
    error = (restored(found, "k") - given["k"].float()).abs()
    assert bool((error <= found["descale_k"].repeat_interleave(128, -1)[..., :S, None] / 2 * 1.001).all())


def test_blocks_of_one_head_have_their_own_scales() -> None:
    given = tensors()
    with torch.no_grad():
        given["k"][:, :, :128] *= 100
    _, found = rounded(given, BLOCKS)
    ratio = found["descale_k"][..., 0] / found["descale_k"][..., 1]
    assert bool((ratio > 50).all())


def test_v_has_positions_last_and_zeros_beyond_them() -> None:
    _, found = rounded(tensors(), Fp8Recipe())
    assert found["v8"].shape == (B, HKV, D, 304)
    assert found["v8"].is_contiguous()
    assert not fp8_rounding.in_order(found["v8"].float())[..., S:].any()


def test_v_lies_as_threads_hold_its_weights() -> None:
    """Of the accumulators of wgmma a thread has columns 2t, 2t + 1, 8 + 2t, 9 + 2t; of its 8-bit operand 4t ... 4t + 3."""
    held = [column for t in range(4) for column in (2 * t, 2 * t + 1, 8 + 2 * t, 9 + 2 * t)]
    given = tensors()
    with torch.no_grad():
        given["v"].copy_(torch.arange(S)[None, None, :, None] % 16)
    _, found = rounded(given, Fp8Recipe(scaling=StaticScaling(q=1, k=1, v=448)))
    assert found["v8"][0, 0, 0, 16:32].tolist() == held


@pytest.mark.parametrize("granularity", ["head", "block"])
@pytest.mark.parametrize("hadamard", [False, True])
def test_scores_and_gradients_are_those_of_what_was_rounded(hadamard: bool, granularity: Any) -> None:
    """Whatever was subtracted or turned, q kᵀ is the model's up to rounding; and gradients arrive as if nothing was."""
    given = tensors(dtype=torch.float16)
    with torch.no_grad():
        given["k"] += 3.0
    made, found = rounded(
        given,
        Fp8Recipe(scaling=CurrentScaling(granularity=granularity), smooth_k=True, hadamard=hadamard),
        dtype="float16",
    )
    k = restored(found, "k").repeat_interleave(H // HKV, 1)
    scores = restored(found, "q") @ k.transpose(2, 3) + found["shift"][..., None]
    own = given["q"].float() @ given["k"].float().repeat_interleave(H // HKV, 1).transpose(2, 3)
    assert float((scores - own).abs().max()) < 0.05 * float(own.abs().max())
    whole = made.q.float() @ made.k.float().repeat_interleave(H // HKV, 1).transpose(2, 3)
    torch.testing.assert_close(whole, scores, rtol=0, atol=0.1)
    upstream = torch.randn(B, H, S, D).half()
    for mine, name in ((made.q, "q"), (made.k, "k")):
        (grad,) = torch.autograd.grad(mine, given[name], upstream[:, : mine.shape[1]])
        assert torch.equal(grad, upstream[:, : mine.shape[1]])


@pytest.mark.parametrize("hadamard", [False, True])
def test_the_backward_gets_what_was_rounded_turned_back(hadamard: bool) -> None:
    given = tensors()
    with torch.no_grad():
        given["k"] += 3.0
    made: Any = rounded(given, Fp8Recipe(smooth_k=True, hadamard=hadamard))[0]
    for name in ("q", "k"):
        error = (getattr(made, name).float() - given[name].float()).square().mean().sqrt()
        assert 0.005 < float(error) < 0.05


@pytest.mark.parametrize(
    "recipe",
    [
        Fp8Recipe(scaling=StaticScaling(q=4, k=4, v=4)),
        Fp8Recipe(scaling=StaticScaling(q=4, k=4, v=4), smooth_k=True, hadamard=True),
        Fp8Recipe(scaling=CurrentScaling(granularity="tensor"), hadamard=True),
    ],
)
def test_a_backward_in_fp8_gets_nothing_but_gradients(recipe: Fp8Recipe) -> None:
    """It reads q8, k8 and v8, so nothing is restored, whatever scales are; gradients come of what was rotated."""
    given = tensors()
    made: Any = rounded(given, recipe, restored=False)[0]
    for name in "qkv":
        mine, upstream = getattr(made, name), torch.randn(given[name].shape).bfloat16()
        is_rotated = recipe.hadamard and name != "v"
        assert mine is given[name] if not is_rotated else mine.stride() == (0, 0, 0, 0)
        (grad,) = torch.autograd.grad(mine, given[name], upstream)
        right = fp8_rounding.rotated(upstream) if is_rotated else upstream.float()
        torch.testing.assert_close(grad.float(), right, rtol=0.02, atol=0.02)


def test_hadamard_spreads_an_outlier() -> None:
    given = tensors()
    with torch.no_grad():
        given["q"][..., 3] = 100.0
    plain, spread = (rounded(given, Fp8Recipe(hadamard=hadamard))[1]["descale_q"] for hadamard in (False, True))
    assert bool((spread < plain / 4).all())


def test_without_gradients_nothing_is_written_for_a_backward() -> None:
    given = tensors()
    made: Any = rounded(given, Fp8Recipe(), needs_grad=False)[0]
    assert made.q.shape == given["q"].shape
    assert made.q.stride() == (0, 0, 0, 0)


def test_what_is_not_finite_stays_so_and_leaves_the_others_alone() -> None:
    given = tensors()
    with torch.no_grad():
        given["k"][0, 0, 5, 0], given["k"][0, 0, 6, 0] = torch.nan, torch.inf
    made, found = rounded(given, Fp8Recipe(smooth_k=True))
    wrong = found["k8"].float().isnan()
    assert int(wrong.sum()) == 2
    assert bool(wrong[0, 0, 5, 0] & wrong[0, 0, 6, 0])
    assert bool(found["descale_k"].isfinite().all())
    assert int(made.k.isnan().sum()) == 2  # type: ignore[attr-defined]


def test_zeros_have_a_scale() -> None:
    given = {name: torch.zeros_like(x) for name, x in tensors().items()}
    _, found = rounded(given, Fp8Recipe())
    assert torch.equal(found["descale_q"], torch.ones(B, H, 3))


def test_static_scales_saturate() -> None:
    given = tensors()
    with torch.no_grad():
        given["q"][0, 0, 0, 0] = 50.0
    _, found = rounded(given, Fp8Recipe(scaling=StaticScaling(q=4, k=8, v=16)))
    assert [float(found[f"descale_{x}"]) for x in "qkv"] == pytest.approx([4 / 448, 8 / 448, 16 / 448])
    assert float(restored(found, "q")[0, 0, 0, 0]) == pytest.approx(4.0)


def test_a_margin_leaves_room() -> None:
    plain, wide = (
        rounded(tensors(), Fp8Recipe(scaling=CurrentScaling(margin=margin)))[1]["descale_q"] for margin in (0, 2)
    )
    torch.testing.assert_close(wide, 4 * plain)


@pytest.mark.parametrize(("algorithm", "expected"), [("max", 8.0), ("most_recent", 2.0)])
@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_delayed_scales_are_those_of_steps_before(algorithm: Any, expected: float, granularity: Any) -> None:
    """Of 16, 8, 1, 2 the first has left a history of three."""
    emitter = Eager()
    scaling = DelayedScaling(amax_history_len=3, amax_compute_algo=algorithm, granularity=granularity)
    scales = []
    for largest in (16.0, 8.0, 1.0, 2.0, 0.5):
        given = {name: x.detach().clamp(-1, 1) * largest for name, x in tensors().items()}
        _, found = rounded(given, Fp8Recipe(scaling=scaling), emitter, needs_grad=False)
        scales.append(found["descale_q"])
    heads = H if granularity == "head" else 1
    assert torch.equal(scales[0], torch.ones(1, heads, 1))
    torch.testing.assert_close(scales[4], torch.full((1, heads, 1), expected / 448))
    assert emitter.buffers["amax"][:, 0].tolist() == [0.5, 2.0, 1.0]
