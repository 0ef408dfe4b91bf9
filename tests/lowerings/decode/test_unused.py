"""As test_unused_triton.py, of the decode kernel: what lies in a cache where no row may look, and queries that may look nowhere."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from tests.lowerings.decode import problems
from tests.lowerings.decode.problems import Case, Problem, allowed_of, build, results

POISONS = (torch.nan, torch.inf, -torch.inf)
LARGE = 1e3
#: intervals with keys between them that no query has
_GAPS: Any = {
    "seqlen_q": 4,
    "bounds": ([(0, 9), (30, 41), (50, 50), (90, 120)], [(5, 5), (7, 3), (150, 150), (20, 64)]),
}

CASES = (
    Case(name="unused_lengths", bounds=((0, 37), (0, 0))),
    Case(name="unused_window", bounds=((100, 133), (149, 150))),
    Case(name="unused_keys", keys="holes"),
    Case(name="unused_keys_queries", keys="left", seqlen_q=3),
    Case(name="unused_gaps", **_GAPS),
    Case(name="unused_gaps_keys", keys="holes", **_GAPS),
    Case(name="unused_mask", mask="bk"),
    Case(name="unused_mask_heads", mask="hk", bounds=((5, 130), (0, 80)), heads_kv=4),
    Case(name="unused_mask_queries", mask="bqk", **_GAPS),
    Case(name="unused_mask_many_rows", mask="bqk", seqlen_q=16, heads_q=4, heads_kv=1),
    Case(name="unused_bias", bias="bk"),
    Case(name="unused_bias_rows", bias="bqk", seqlen_q=4),
    Case(name="unused_softcap", softcap=2.0, mask="bk"),
    Case(name="unused_distances", distances=4, **_GAPS),
    Case(name="unused_sinks", sinks=True, **_GAPS),
    Case(name="unused_one_split", splits=1, mask="bk"),
    Case(name="unused_two_parts", head_dim=80, head_dim_v=48, **_GAPS),
    Case(name="unused_fp8", stored="float8_e5m2", v_scale=0.5, mask="bk", head_dim=32),
    Case(name="unused_fp8_odd", stored="float8_e5m2", layout="odd", mask="bk"),
)
#: keys of a tile, and slices
_SLICED = dataclasses.replace(problems.SMALL, keys=32, warps=2, slices=2)


def made(case: Case, **options: Any) -> Problem:
    """Columns of a mask are shut, and of a bias -inf; so are rows."""
    problem = build(case, **options)
    for name, shut in (("mask", False), ("bias", -torch.inf)):
        if name in problem.named:
            problem.named[name][..., 40:47] = shut
            problem.named[name][..., 100:] = shut
            if case.seqlen_q > 1:
                problem.named[name][..., 1, :] = shut
    return problem


def poisoned(problem: Problem, values: tuple[float, ...]) -> Problem:
    """With those values, by turns, in keys and values that no row uses, and in queries without a key."""
    case, pairs = problem.case, allowed_of(problem)
    keys = ~pairs.any(2).unflatten(1, (case.heads_kv, -1)).any(2)[..., None]
    rows = ~pairs.any(3)[..., None]
    k, v = (_filled(x, keys, values) for x in (problem.k, problem.v))
    return dataclasses.replace(problem, q=_filled(problem.q, rows, values), k=k, v=v)


def _filled(x: Tensor, where: Tensor, values: tuple[float, ...]) -> Tensor:
    fill = torch.tensor(values, device=x.device)
    of_positions = fill[torch.arange(x.shape[2], device=x.device) % len(values)][:, None]
    return problems._like(x, torch.where(where, of_positions, x.float().nan_to_num(0.0)), x.dtype)


def check(problem: Problem) -> None:
    clean, got = (results(poisoned(problem, values)) for values in ((LARGE,), POISONS))
    for label, mine, other in zip(("out", "lse"), got, clean, strict=True):
        assert torch.equal(mine, other), f"{label} changes by what no row uses"
    rows = ~allowed_of(problem).any(3)
    assert not got[0].masked_select(rows[..., None]).any()
    if not problem.case.sinks:
        assert torch.all(got[1].masked_select(rows) == -torch.inf)
    problems.assert_within_rule(got, poisoned(problem, (0.0,)))


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.removeprefix("unused_"))
def test_nothing_leaks(case: Case) -> None:
    check(made(case))


@pytest.mark.parametrize("name", ["unused_gaps", "unused_mask", "unused_bias_rows", "unused_two_parts"])
def test_nothing_leaks_where_warps_go_on_alone(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    check(made(dataclasses.replace(case, name=f"{name}_sliced"), schedule=_SLICED))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.removeprefix("unused_"))
def test_nothing_leaks_on_a_gpu(case: Case) -> None:
    check(made(case, dtype=torch.bfloat16))


def test_a_sink_of_minus_infinity_beside_no_key_is_none() -> None:
    problem = build(Case(name="unused_no_sink", sinks=True, bounds=((0, 0), (0, 150))))
    problem.named["sinks"].fill_(-torch.inf)
    out, lse = results(problem)
    assert not out[0].any()
    assert torch.all(lse[0] == -torch.inf)
    assert torch.isfinite(lse[1]).all()
