"""What the kernels in FP8 take is a part of what our Triton kernels do; what the one for Hopper leaves the other takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from attn_compiler import Fp8Recipe
from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.fp8.rounding import VECTOR
from attn_compiler.lowerings.hopper import takes as hopper_takes
from attn_compiler.lowerings.shared.limits import kernel_limits
from attn_compiler.lowerings.shared.limits.takes import Takes, check_gpu
from attn_compiler.lowerings.triton import takes
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.scores import Sinks, Softcap
from attn_compiler.spec.target import Target
from tests.lowerings.specs import CAUSAL, bias, dense, make_spec, words


def asked(**given: Any) -> AttentionSpec:
    sizes: dict[str, Any] = {"head_dim": 128, "seqlen_q": 4096, "seqlen_kv": 4096, "mask": CAUSAL}
    return dataclasses.replace(make_spec(**sizes | given), fp8=Fp8Recipe())


@pytest.mark.parametrize(
    ("less", "more"), [(takes.FP8, kernel_limits.TAKES), (hopper_takes.FP8, takes.FP8)], ids=["triton", "hopper"]
)
def test_each_takes_a_part_of_what_another_does(less: Takes, more: Takes) -> None:
    assert set(less.dtypes) <= set(more.dtypes)
    assert set(less.changes) <= set(more.changes)
    assert less.parts <= more.parts
    assert less.head_dims is not None
    assert more.head_dims is not None
    assert (less.head_dims.most or 0) <= (more.head_dims.most or 0)
    assert less.head_dims.multiple % more.head_dims.multiple == 0
    for sm in (75, 80, 86, 89, 90, 100, 120):
        target = Target.fake(sm=sm)
        assert check_gpu(less, target) or not check_gpu(more, target)


@pytest.mark.parametrize(
    ("sm", "by_triton", "by_hopper"),
    [(80, False, False), (89, True, False), (90, True, True), (100, True, False), (120, True, False)],
)
def test_machines(sm: int, by_triton: bool, by_hopper: bool) -> None:
    target = Target.fake(sm=sm)
    assert (not check_gpu(takes.FP8, target), not check_gpu(hopper_takes.FP8, target)) == (by_triton, by_hopper)
    lowerings = by_name("triton_fp8"), by_name("hopper_fp8")
    assert tuple(not lowering.unavailable(target) for lowering in lowerings) == (by_triton, by_hopper)


@pytest.mark.parametrize(
    ("given", "by_hopper"),
    [
        ({}, True),
        ({"changes": (Softcap(cap=30.0), Sinks(requires_grad=False))}, True),
        ({"head_dim": VECTOR}, True),
        ({"head_dim": 192}, False),
        ({"mask": dense(1, 1, 4096, 4096)}, False),
        ({"changes": (bias(1, 8, 4096, 4096),)}, False),
        ({"scale": -0.1}, False),
        ({"dropout_p": 0.1}, False),
    ],
)
def test_what_the_one_leaves_the_other_takes(given: dict[str, Any], by_hopper: bool) -> None:
    spec, target = asked(**given), Target.fake()
    assert words(by_name("triton_fp8").why_not(spec, target)) == ""
    assert (by_name("hopper_fp8").why_not(spec, target) == []) == by_hopper
