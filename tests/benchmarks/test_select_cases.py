from __future__ import annotations

import pytest

from attn_compiler.lowerings.choice import shape_class
from benchmarks import bench_select, kernel_peers, select_cases
from benchmarks.kernel_cases import Case
from benchmarks.select_cases import BY_NAME, CASES, DROPOUT, DROPOUT_CASES, spec_of


def test_the_grid_has_what_it_should() -> None:
    assert len(BY_NAME) == len(CASES) >= 60
    assert {case.head_dim for case in CASES} == {64, 96, 128, 256}
    assert {case.seqlen for case in CASES} == {512, 1024, 2048, 4096, 8192, 32768}
    assert any(case.heads_kv < case.heads_q for case in CASES)
    assert {case.name for case in CASES if case.peers} == set(select_cases._FLEX)
    for case in CASES:
        assert case.heads_q % case.heads_kv == 0
        assert set(case.peers) <= set(kernel_peers.PEERS)
        assert case.name.endswith(f"_d{case.head_dim}_s{case.seqlen}")


def test_a_run_that_is_cut_off_has_some_of_everything() -> None:
    sorts = {case.name.split("_d")[0].removesuffix("_gqa") for case in CASES}
    assert {case.name.split("_d")[0].removesuffix("_gqa") for case in CASES[:52]} >= sorts - {
        "padded_causal",
        "lengths_causal",
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_its_spec_is_of_the_sort_that_its_name_says(case: Case) -> None:
    spec = select_cases.spec_of(case, training=True)
    shape = shape_class.classify(spec)
    assert shape.mask == {"padded": "padding"}.get(case.name.split("_")[0], case.name.split("_")[0])
    assert (shape.head_dim, shape.seqlens) == (case.head_dim, (case.seqlen, case.seqlen))
    assert shape.grouped == (case.heads_kv < case.heads_q)
    assert spec.needs_grad
    assert not select_cases.spec_of(case, training=False).needs_grad


def test_cases_with_dropout_are_asked_for_by_name_alone() -> None:
    asked = [case for case, _ in bench_select.plan(["dropout*"], ["forward"])]
    assert sorted(case.name for case in asked) == sorted(case.name for case in DROPOUT_CASES)
    assert all(case.name.startswith(DROPOUT) and case.dropout_p == 0.1 for case in asked)
    assert not {case.name for case, _ in bench_select.plan(["*"], ["forward"])} & {case.name for case in asked}
    # Spec and sides have it, so that what is timed is what is chosen for.
    assert all(spec_of(case, training=True).score.dropout_p == 0.1 for case in asked)
