from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.base import Operands
from attn_compiler.lowerings.fp8 import quantise, rounding
from attn_compiler.spec.fp8_recipe import CurrentScaling, DelayedScaling, Fp8Recipe, StaticScaling
from attn_compiler.spec.scores import ScoreChange, Sinks, Softcap
from tests.lowerings.fp8.problems import Eager
from tests.lowerings.specs import make_spec

B, H, HKV, S, D = 2, 4, 2, 300, 32
BLOCKS = Fp8Recipe(scaling=CurrentScaling(granularity="block"))


def tensors(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (B, H, S, D), "k": (B, HKV, S, D), "v": (B, HKV, S, D)}
    return {name: torch.randn(shape, generator=generator).to(dtype).requires_grad_() for name, shape in shapes.items()}


def rounded(
    given: dict[str, Tensor], recipe: Fp8Recipe, emitter: Eager | None = None, positions_last: bool = True, **spec: Any
) -> tuple[quantise.Rounded, dict[str, Tensor]]:
    described = make_spec(batch=B, heads=H, heads_kv=HKV, seqlen_q=S, seqlen_kv=S, head_dim=D, **spec)
    asked: Any = emitter or Eager()
    nodes: Any = given
    made: Any = quantise.emit(
        asked, dataclasses.replace(described, fp8=recipe), Operands(**nodes), positions_last=positions_last
    )
    names = quantise.names(dataclasses.replace(described, fp8=recipe))
    return made, dict(zip(names, made.operands, strict=True))


def restored(found: dict[str, Tensor], name: str) -> Tensor:
    x = found[f"{name}8"].float()
    x = rounding.in_order(x).transpose(2, 3)[:, :, :S] if name == "v" else x
    descale = found[f"descale_{name}"]
    return x * (descale if descale.shape[2] == 1 else descale.repeat_interleave(128, -1)[..., :S])[..., None]


SHAPES = {"tensor": (1, 1, 1), "head": (B, H, 1), "block": (B, H, 3)}


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
    assert not rounding.in_order(found["v8"].float())[..., S:].any()


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
@pytest.mark.parametrize("changes", [(), (Softcap(cap=30.0),), (Sinks(requires_grad=True),)])
def test_scores_are_those_of_what_was_rounded(
    changes: tuple[ScoreChange, ...], hadamard: bool, granularity: Any
) -> None:
    """Whatever was subtracted or turned, q kᵀ is the model's up to rounding, and to a number for each row where a softmax alone sees it."""
    given = {name: x.detach() for name, x in tensors(dtype=torch.float16).items()}
    given["k"] += 3.0
    recipe = Fp8Recipe(scaling=CurrentScaling(granularity=granularity), smooth_k=True, hadamard=hadamard)
    _, found = rounded(given, recipe, dtype="float16", changes=changes)
    k = restored(found, "k").repeat_interleave(H // HKV, 1)
    own = given["q"].float() @ given["k"].float().repeat_interleave(H // HKV, 1).transpose(2, 3)
    far = restored(found, "q") @ k.transpose(2, 3) - own
    assert ("shift" in found) is bool(changes)
    far += found["shift"][..., None] if changes else -far.mean(-1, keepdim=True)
    assert float(far.abs().max()) < 0.05 * float(own.abs().max())


@pytest.mark.parametrize("positions_last", [True, False])
def test_for_a_backward_numbers_are_kept_and_no_copies_of_q_and_k(positions_last: bool) -> None:
    changes = (Softcap(cap=30.0),)
    made, _ = rounded(tensors(), Fp8Recipe(smooth_k=True), positions_last=positions_last, changes=changes)
    names = quantise.kept_names(has_mean=True, positions_last=positions_last)
    kept: Any = dict(zip(names, made.kept, strict=True))
    assert not any(x.requires_grad for x in kept.values())
    wide = {name for name, x in kept.items() if x.numel() > B * H * S and x.dtype != torch.float8_e4m3fn}
    assert wide == ({"v"} if positions_last else set())


def test_hadamard_spreads_an_outlier() -> None:
    given = tensors()
    with torch.no_grad():
        given["q"][..., 3] = 100.0
    plain, spread = (rounded(given, Fp8Recipe(hadamard=hadamard))[1]["descale_q"] for hadamard in (False, True))
    assert bool((spread < plain / 4).all())


def test_without_gradients_nothing_is_kept() -> None:
    assert rounded(tensors(), Fp8Recipe(), needs_grad=False)[0].kept == []


def test_scales_that_are_known_cast_q_and_k_by_nodes_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same numbers as the op, in the order of q and k."""
    given = {name: x.detach().transpose(1, 2).contiguous().transpose(1, 2) for name, x in tensors().items()}
    static = Fp8Recipe(scaling=StaticScaling(q=3.5, k=7, v=5))
    _, by_nodes = rounded(given, static)
    monkeypatch.setattr(quantise._Quantiser, "_fuses", lambda *_: False)
    _, by_op = rounded(given, static)
    assert by_nodes["q8"].stride() == given["q"].stride()
    assert by_op["q8"].is_contiguous()
    for name in ("q8", "k8", "v8"):
        assert torch.equal(by_nodes[name].float(), by_op[name].float())
    torch.testing.assert_close([by_nodes[f"descale_{x}"] for x in "qkv"], [by_op[f"descale_{x}"] for x in "qkv"])


def test_what_is_not_finite_stays_so_and_leaves_the_others_alone() -> None:
    given = tensors()
    with torch.no_grad():
        given["k"][0, 0, 5, 0], given["k"][0, 0, 6, 0] = torch.nan, torch.inf
    _, found = rounded(given, Fp8Recipe(smooth_k=True))
    wrong = found["k8"].float().isnan()
    assert int(wrong.sum()) == 2
    assert bool(wrong[0, 0, 5, 0] & wrong[0, 0, 6, 0])
    assert bool(found["descale_k"].isfinite().all())


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


@pytest.mark.parametrize("scaling", [CurrentScaling, DelayedScaling])
def test_a_margin_leaves_room(scaling: Any) -> None:
    found = []
    for margin in (0, 2):
        emitter = Eager()
        # Of delayed scaling, the first step's scales are 1.
        for _ in range(2):
            _, made = rounded(tensors(), Fp8Recipe(scaling=scaling(margin=margin)), emitter)
        found.append(made["descale_q"])
    plain, wide = found
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
