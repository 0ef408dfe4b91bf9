"""The numbers of the kernel over a latent: every part of a plan that it takes, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attn_compiler.lowerings.decode import latent_schedule
from attn_compiler.spec.target import Target
from tests.lowerings.decode import problems
from tests.lowerings.decode.latent_problems import SMALL, of_latent, results
from tests.lowerings.decode.problems import BY_NAME, MASKS, MEANS, Case, Problem

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the same cases run on the GPU, with larger tiles")

SCORES = ("softcap", "softcap_queries", "sinks", "sinks_alone", "bias", "bias_k", "negative_scale")
CASES = (
    *MASKS,
    *(case for case in MEANS if not (case.slopes or case.stored)),
    *(BY_NAME[name] for name in SCORES),
    BY_NAME["sixteen_queries"],
    BY_NAME["one_key"],
)


def check(problem: Problem, dtype: torch.dtype = torch.float32) -> None:
    found = results(problem)
    assert [x.dtype for x in found] == [torch.float32, torch.float32]
    problems.assert_within_rule(found, problem)


@pytest.mark.in_turns(2)
@interpreted
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention(case: Case) -> None:
    check(of_latent(case))


@interpreted
@pytest.mark.parametrize(
    ("rank", "rope"), [(16, 0), (32, 0), (18, 6), (64, 16), (24, 40), (128, 8)], ids=lambda x: str(x)
)
def test_ranks_and_parts_beside(rank: int, rope: int) -> None:
    check(of_latent(BY_NAME["lengths"], rank=rank, rope=rope))


@pytest.mark.in_turns
@interpreted
@pytest.mark.parametrize("heads", [1, 7, 16, 20, 40])
@pytest.mark.parametrize("splits", [1, 3, None])
def test_heads_of_one_and_of_several_tiles(heads: int, splits: int | None) -> None:
    check(of_latent(Case(name="heads", heads_q=heads, bounds=((0, 99), (0, 0)), splits=splits)))


@pytest.mark.in_turns
@interpreted
@pytest.mark.parametrize("rows", [32, 64])
@pytest.mark.parametrize("name", ["queries_mask", "bias", "keys", "several_queries"])
def test_larger_tiles(rows: int, name: str) -> None:
    case = dataclasses.replace(BY_NAME[name], heads_q=24)
    check(of_latent(case, schedule=dataclasses.replace(SMALL, rows=rows)))


@interpreted
@pytest.mark.parametrize("name", ["lengths", "softcap_queries", "sinks", "bias"])
def test_half_precision(name: str) -> None:
    check(of_latent(BY_NAME[name], dtype=torch.float16))


@interpreted
def test_tensors_between_two_vectors() -> None:
    check(of_latent(BY_NAME["lengths"], unaligned=True))


def test_more_splits_than_are_added_up_at_a_time() -> None:
    case = Case(name="many_splits", seqlen_kv=700, splits=40, bounds=((0, 700), (30, 70)))
    check(of_latent(case, schedule=dataclasses.replace(SMALL, keys=16)))


def _with_heads(case: Case, heads: int) -> Case:
    """A case of so many heads. Bounds that each head has are those of the case's heads again and again."""
    bounds = case.bounds
    if case.by_head and bounds is not None:
        rows = heads * case.seqlen_q
        bounds = tuple((one * rows)[:rows] if isinstance(one, list) else one for one in bounds)
    return dataclasses.replace(case, heads_q=heads, bounds=bounds)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bfloat16_on_a_gpu(case: Case, heads: int) -> None:
    case = _with_heads(case, heads // case.seqlen_q or 1)
    problem = of_latent(case, rank=512, rope=64, dtype=torch.bfloat16)
    schedule = latent_schedule.of_triton(problem.spec, Target.current("cuda"))
    check(of_latent(case, rank=512, rope=64, dtype=torch.bfloat16, schedule=schedule))
