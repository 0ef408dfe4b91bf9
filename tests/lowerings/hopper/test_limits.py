"""Where the kernel for Hopper runs, and what it leaves to the Triton family."""

from __future__ import annotations

from typing import Any

import pytest

from attn_compiler.lowerings.hopper.lowering import HopperAttention
from attn_compiler.spec.scores import Sinks, Softcap
from attn_compiler.spec.target import Target
from tests.lowerings.specs import CAUSAL, bias, dense, make_spec, words

HOPPER = HopperAttention()
H200 = Target.fake()


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (H200, ""),
        (Target.fake(sm=80), "sm80"),
        (Target.fake(sm=100), "sm100"),
        (Target.fake(triton="3.5.1"), "Triton 3.6 or newer"),
        (Target.fake(triton="3.7.1"), ""),
        (Target.fake(triton="3.9.0"), ""),
        (Target.fake(triton="3.10.0"), "compiled with Triton 3.6, 3.7, 3.8 or 3.9; observed 3.10.0"),
        (Target.fake(device="cpu"), "device cpu"),
        (Target.fake(device="cpu", triton_interpreted=True), "interpreter"),
    ],
)
def test_where_it_runs(machine: Target, said: str) -> None:
    reasons = words(HOPPER.unavailable(machine))
    assert said in reasons
    assert bool(reasons) is bool(said)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, ""),
        ({"mask": CAUSAL}, ""),
        ({"head_dim": 256}, ""),
        ({"head_dim": 264}, ""),
        ({"head_dim": 512}, ""),
        ({"head_dim": 520}, "512"),
        ({"head_dim": 264, "changes": (bias(1, 8, 4096, 4096),)}, "head dims are at most 256"),
        ({"head_dim": 68}, "8"),
        ({"dtype": "float32"}, "float32"),
        ({"dtype": "float16"}, ""),
        ({"mask": dense(2, 1, 4096, 4096)}, ""),
        ({"changes": (bias(1, 8, 4096, 4096),)}, ""),
        ({"changes": (bias(1, 8, 1, 4096),)}, "for each pair"),
        ({"changes": (bias(1, 8, 4096, 1),)}, "for each pair"),
        ({"changes": (bias(1, 8, 4096, 4095),), "seqlen_kv": 4095}, "a multiple of 8 keys"),
        ({"changes": (bias(1, 8, 4096, "8*s0"),), "seqlen_kv": "8*s0"}, ""),
        ({"changes": (bias(1, 8, 4096, "s0"),), "seqlen_kv": "s0"}, "a multiple of 8 keys"),
        ({"changes": (bias(1, 8, 4096, 4096),), "scale": 1e-7}, "beside a bias"),
        ({"scale": 1e-40}, "scale is at least"),
        ({"changes": (Softcap(cap=1e35),)}, "softcap is at most"),
        ({"changes": (Softcap(cap=30.0), Sinks(requires_grad=True))}, ""),
    ],
)
def test_what_it_takes(given: dict[str, Any], said: str) -> None:
    sizes: dict[str, Any] = {"seqlen_q": 4096, "seqlen_kv": 4096}
    reasons = words(HOPPER.why_not(make_spec(**sizes | given), H200))
    assert said in reasons
    assert bool(reasons) is bool(said)
