"""What our Triton kernels can't do, whichever family launches them: one reason for each limit, at the limit and beyond."""

from __future__ import annotations

from typing import Any

import pytest

from attn_compiler.lowerings.shared.limits import kernel_limits
from attn_compiler.lowerings.shared.parts.kernel_plan import FARTHEST, MOST_BLOCKS, MOST_POSITIONS
from attn_compiler.spec.target import Target
from tests.lowerings.specs import bias, dense, make_spec, words

H200 = Target.fake()
INTERPRETED = Target.fake(device="cpu", triton_interpreted=True)


def said(target: Target = H200, **spec: Any) -> str:
    return words(kernel_limits.check_site(make_spec(**spec), target))


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (Target.fake(sm=80), ""),
        (Target.fake(sm=75), "GPU architecture from sm80"),
        (Target.fake(triton=""), "Triton 3.6 or newer is installed; observed no Triton"),
        (Target.fake(triton="3.5.1"), "Triton 3.6 or newer is installed; observed 3.5.1"),
        (Target.fake(triton="3.6.0"), ""),
        (Target.fake(triton="3.10.0"), ""),
        (Target.fake(device="cpu"), "NVIDIA GPU"),
        (INTERPRETED, ""),
        (Target.fake(device="cpu", triton_interpreted=True, triton=""), "observed no Triton"),
    ],
)
def test_machines(target: Target, reason: str) -> None:
    found = words(kernel_limits.check_machine(target))
    assert reason in found
    assert bool(found) == bool(reason)


def test_a_machine_that_runs_none_has_that_reason_alone() -> None:
    found = kernel_limits.check_site(make_spec(dtype="float64", head_dim=999), Target.fake(sm=70))
    assert found == kernel_limits.check_machine(Target.fake(sm=70))


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_the_interpreter_computes_no_bfloat16(dtype: str) -> None:
    found = said(INTERPRETED, device="cpu", dtype=dtype)
    assert bool(found) == (dtype == "bfloat16")
    assert said(H200, dtype=dtype) == ""


@pytest.mark.parametrize("sm", [80, 86, 87, 89, 90, 100, 120])
def test_what_there_is_no_room_for_beside_wide_heads(sm: int) -> None:
    target, is_small = Target.fake(sm=sm), sm in (86, 87, 89, 120)
    most = 128 if is_small else 256
    where = "on sm86 to sm89 and from sm120 on, " if is_small else ""
    learned = f"{where}head dims are at most {most} where what is added to the scores is learned"
    for what, given in (
        (f"{where}head dims are at most {most} in float32", {"dtype": "float32", "needs_grad": False}),
        (learned, {"changes": (bias(1, 1, 128, 128),)}),
    ):
        assert said(target, head_dim=most, **given) == ""
        assert what in said(target, head_dim=most + 8, **given)
        assert what in said(target, head_dim=64, head_dim_v=most + 8, **given)
    for given in ({}, {"needs_grad": False}, {"changes": (bias(1, 1, 128, 128, requires_grad=False),)}):
        assert said(target, head_dim=512, **given) == ""
    assert said(target, head_dim=512, changes=(bias(1, 1, 128, 128),), needs_grad=False) == ""


@pytest.mark.parametrize("sm", [80, 89, 120])
def test_a_dense_mask_has_no_room_beside_the_gradients_of_the_widest_heads(sm: int) -> None:
    target, mask, rule = Target.fake(sm=sm), dense(1, 1, 128, 128), "at most 256 with gradients beside a dense mask"
    assert (rule in said(target, head_dim=264, mask=mask)) == (sm != 80)
    assert said(target, head_dim=256, mask=mask) == said(target, head_dim=512, mask=mask, needs_grad=False) == ""


@pytest.mark.parametrize("name", ["seqlen_q", "seqlen_kv"])
def test_positions_are_counted_in_32_bits(name: str) -> None:
    assert said(**{name: MOST_POSITIONS}) == ""
    assert f"{name} {MOST_POSITIONS + 1}" in said(**{name: MOST_POSITIONS + 1})
    assert said(**{name: "s0"}) == ""


def test_batch_and_heads_are_counted_together() -> None:
    assert "batch · num_heads_q is at most" not in said(batch=MOST_BLOCKS // 8, heads=8)
    assert "batch · num_heads_q is at most" in said(batch=MOST_BLOCKS // 8 + 1, heads=8)
    assert "batch · num_heads_q is at most" not in said(batch="s0", heads=8)


def test_a_learned_bias_is_summed_over_so_many_tiles() -> None:
    sizes = {"batch": 65535, "heads": 1, "heads_kv": 1, "seqlen_q": 8192, "seqlen_kv": 8192}
    rule = "is added to the scores of at most"
    assert rule in said(**sizes, changes=(bias(1, 1, 1, 1),))
    # Of a bias for each query and key, a tile of it is one program's.
    assert rule not in said(**sizes, changes=(bias(1, 1, 8192, 8192),))
    assert rule not in said(**sizes, changes=(bias(1, 1, 1, 1, requires_grad=False),))
    assert rule not in said(**sizes, changes=(bias(1, 1, 1, 1),), needs_grad=False)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"head_dim": 12}, "multiple of 8"),
        ({"head_dim": 12, "dtype": "float32"}, ""),
        ({"head_dim": 512}, ""),
        ({"head_dim": 520}, "at most 512"),
        ({"dtype": "float64"}, "observed float64"),
        ({"mask": dense(1, 1, 128, 128, dtype="float64")}, "the mask is"),
        ({"scale": -2.0}, ""),
        ({"scale": 1e4}, "the scale is at most 256"),
        ({"dropout_p": 0.1}, ""),
    ],
)
def test_what_they_take(given: dict[str, Any], rule: str) -> None:
    found = said(**given)
    assert rule in found
    assert bool(found) == bool(rule)


def test_what_they_ask_of_strides() -> None:
    assert (kernel_limits.DEMAND.alignment, kernel_limits.DEMAND.farthest) == (16, FARTHEST)
