"""What FlashAttention-4 takes: bands in half precision on Hopper and Blackwell."""

from __future__ import annotations

from typing import Any

import pytest

from attn_compiler.lowerings.fa4.takes import TAKES
from attn_compiler.lowerings.shared.limits.takes import check_gpu, refused
from attn_compiler.spec.scores import Sinks, Softcap
from attn_compiler.spec.target import Target
from tests.lowerings.specs import CAUSAL, bias, make_spec, words


@pytest.mark.parametrize(
    ("sm", "is_taken"), [(80, False), (89, False), (90, True), (91, False), (100, True), (103, True), (120, False)]
)
def test_it_has_kernels_for_some_architectures(sm: int, is_taken: bool) -> None:
    reasons = words(check_gpu(TAKES, Target.fake(sm=sm)))
    assert (reasons == "") is is_taken
    assert is_taken or f"observed sm{sm}" in reasons


@pytest.mark.parametrize(
    "spec",
    [
        {"mask": CAUSAL, "changes": (Softcap(cap=30.0), Sinks(requires_grad=False))},
        {"dtype": "float16", "head_dim": 72, "head_dim_v": 48},
        {"seqlen_q": "s0", "seqlen_kv": "s1", "heads_kv": 2},
    ],
    ids=str,
)
def test_it_takes_bands_with_a_softcap_and_sinks(spec: dict[str, Any]) -> None:
    asked = make_spec(**spec)
    assert refused(TAKES, asked) == []
    assert TAKES.beyond(asked) == set()


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        ({"dtype": "float32"}, "observed float32"),
        ({"head_dim": 60}, "multiple of 8"),
        ({"head_dim": 264}, "at most 256"),
        ({"dropout_p": 0.1}, "no dropout"),
        ({"scale": -0.125}, "the scale is positive"),
    ],
)
def test_the_rest_is_refused(spec: dict[str, Any], rule: str) -> None:
    assert rule in words(refused(TAKES, make_spec(**spec)))


def test_a_bias_is_a_part_that_it_has_no_argument_for() -> None:
    assert TAKES.beyond(make_spec(changes=(bias(1, 8, 128, 128),))) == {"bias"}
