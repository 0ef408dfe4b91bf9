"""dq, and gradients of what is added to the scores, of kept scores: over several spans of queries, and what was not written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from tests.lowerings import kernel_problems
from tests.lowerings.kernel_cases import Case
from tests.lowerings.kernel_launches import launched
from tests.lowerings.kernel_problems import build, results

SEVERAL_SPANS = 140


@pytest.fixture
def nan_where_empty() -> Iterator[None]:
    """What `torch.empty` gives holds NaN, whatever was there before."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def check(case: Case) -> None:
    problem = build(case)
    assert "attention_grad_q_kept" in launched(problem)
    kernel_problems.assert_within_rule(results(problem), problem)


@pytest.mark.parametrize("given", [{"bias": "hqk"}, {"bias": "qk"}, {"distances": 2}, {"distances": 1}], ids=str)
def test_several_spans(given: dict[str, object]) -> None:
    check(Case(name="spans", seqlen_q=SEVERAL_SPANS, seqlen_kv=33, **given))  # type: ignore[arg-type]


@pytest.mark.in_turns
@pytest.mark.parametrize("band", [Band(right=0), Band(left=20, right=5), Band(right=-40), Band(left=0)], ids=str)
@pytest.mark.parametrize("given", [{"bias": "hqk"}, {"distances": 2}], ids=str)
def test_diagonals_and_tiles_beyond_a_band_give_nothing(given: dict[str, object], band: Band) -> None:
    check(Case(name="band", batch=1, seqlen_q=SEVERAL_SPANS, seqlen_kv=100, band=band, **given))  # type: ignore[arg-type]


@pytest.mark.in_turns
@pytest.mark.parametrize("given", [{"bias": "bhqk"}, {"distances": 2}], ids=str)
@pytest.mark.parametrize(
    "mask", [{"keys": "right"}, {"keys": "left"}, {"documents": True}, {"band": Band(right=-40)}], ids=str
)
def test_tiles_that_were_not_written(mask: dict[str, object], given: dict[str, object], nan_where_empty: None) -> None:
    """Each of these masks leaves whole tiles without a pair."""
    check(Case(name="lists", seqlen_q=70, seqlen_kv=130, **mask, **given))  # type: ignore[arg-type]


@pytest.mark.in_turns
@pytest.mark.parametrize("given", [{"bias": "bhqk"}, {"distances": 2}], ids=str)
@pytest.mark.parametrize("mask", [{"keys": "holes"}, {"rows": True}, {"mask": "bq"}], ids=str)
def test_masks_within_tiles(mask: dict[str, object], given: dict[str, object], nan_where_empty: None) -> None:
    check(Case(name="lists", seqlen_q=40, seqlen_kv=100, **mask, **given))  # type: ignore[arg-type]


def test_a_bias_and_distances() -> None:
    check(Case(name="both", seqlen_q=SEVERAL_SPANS, seqlen_kv=40, bias="hqk", distances=2, keys="left"))
