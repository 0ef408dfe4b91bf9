from __future__ import annotations

import dataclasses

import pytest

from attn_compiler.lowerings.choice import flex
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.masks import Causal, Dense, Flag, MaskSpec
from tests.cases import CASES, build


def _spec(**changes: object) -> AttentionSpec:
    return dataclasses.replace(build(CASES[0]).spec, **changes)  # type: ignore[arg-type]


DENSE = MaskSpec(dense=Dense(shape=(1, 1, 512, 512), dtype="bool", terms=1), reason="it comes in")
PADDING = MaskSpec(dense=Dense(shape=(2, 1, 1, 512), dtype="bool", terms=1), reason="it comes in")


@pytest.mark.parametrize("name", ["sdpa_efficient", "sdpa_cpu_flash", "triton", "decode"])
def test_a_tensor_with_an_element_for_each_score_is_not_made(name: str) -> None:
    (reason,) = flex.check_flex_call(_spec(mask=DENSE), name)
    assert "1 × 1 × 512 × 512" in reason.observed
    assert reason.remedy is not None
    assert name in reason.remedy


@pytest.mark.parametrize("name", ["sdpa_flash", "triton", "cudnn"])
@pytest.mark.parametrize(
    "mask", [MaskSpec(), MaskSpec(kinds=(Causal(),), flag=Flag.CALLED), PADDING], ids=["none", "causal", "padding"]
)
def test_what_needs_none_is_allowed(name: str, mask: MaskSpec) -> None:
    assert not flex.check_flex_call(_spec(mask=mask), name)


@pytest.mark.parametrize("name", ["math", "reference"])
def test_what_writes_the_scores_is_not(name: str) -> None:
    assert flex.check_flex_call(_spec(mask=MaskSpec()), name)
