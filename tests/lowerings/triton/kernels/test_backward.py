"""Kernels of gradients that only this family has: of a bias, and of weights that were kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from tests.lowerings import kernel_problems
from tests.lowerings.kernel_cases import Case
from tests.lowerings.kernel_launches import launched
from tests.lowerings.kernel_problems import build, results


# Gradients of what is added to the scores, for every way that it may broadcast.
@pytest.mark.in_turns(2)
@pytest.mark.parametrize("axes", ["none", "b", "k", "q", "hk", "bq", "bhk", "qk", "bqk"])
def test_a_bias_that_varies_along_some_axes(axes: str) -> None:
    problem = build(
        Case(name="bias", seqlen_q=33, seqlen_kv=40, band=Band(right=0, from_end=True), bias=axes.replace("none", ""))
    )
    kernel_problems.assert_within_rule(results(problem), problem)


@pytest.mark.parametrize(("heads", "sizes"), [(1, (33, 40)), (2, (1, 40)), (1, (40, 1)), (2, (64, 64))])
def test_numbers_by_distance(heads: int, sizes: tuple[int, int]) -> None:
    problem = build(Case(name="distances", batch=1, seqlen_q=sizes[0], seqlen_kv=sizes[1], distances=heads))
    kernel_problems.assert_within_rule(results(problem), problem)


def test_only_the_first_of_the_eight_copies_gets_a_gradient() -> None:
    problem = build(Case(name="copies", batch=1, seqlen_q=33, seqlen_kv=40, distances=2))
    *_, gradient = results(problem)
    assert gradient[:, 0, :72].all()
    assert not gradient[:, 0, 72:].any()
    assert not gradient[:, 1:].any()


@pytest.mark.parametrize("changed", [{"softcap": 2.0}, {"dropout_p": 0.3}, {"sinks": True}, {"head_dim": 48}], ids=str)
def test_beside_other_changes(changed: dict[str, object]) -> None:
    case = Case(name="both", seqlen_q=33, seqlen_kv=40, keys="holes", bias="hk", distances=1, **changed)  # type: ignore[arg-type]
    problem = build(case)
    kernel_problems.assert_within_rule(results(problem), problem)


def test_padding_that_holds_nan_leaves_no_trace() -> None:
    problem = build(Case(name="padded", seqlen_q=33, seqlen_kv=70, keys="right", bias="hk"))
    assert problem.k.isnan().any()
    *_, gradient = results(problem)
    assert bool(gradient.isfinite().all())
    unused = ~problem.named["keys"].any(0)
    assert torch.equal(gradient[..., unused], torch.zeros_like(gradient[..., unused]))


# dq, and gradients of what is added to the scores, of kept scores.
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
