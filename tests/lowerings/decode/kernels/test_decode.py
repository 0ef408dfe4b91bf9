"""The decode kernel's numbers: every part of a plan, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from attn_compiler.lowerings.decode import schedule as decode_schedule
from attn_compiler.lowerings.decode.plan import DecodeCall
from attn_compiler.spec.target import Target
from tests.lowerings.decode import problems as decode_problems
from tests.lowerings.decode.problems import ALL, BY_NAME, Case, Problem, build, planned, results, run

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the same cases run on the GPU, with larger tiles")


@pytest.mark.in_turns(2)
@interpreted
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_attention(case: Case) -> None:
    problem = build(case)
    decode_problems.assert_within_rule(results(problem), problem)
    assert_counted_down(problem)


def assert_counted_down(problem: Problem) -> None:
    """The counters are as they were: the next site, and the next step, use them again."""
    assert "count" not in problem.named or not problem.named["count"].any()


@interpreted
@pytest.mark.parametrize("name", ["lengths", "softcap_queries", "sinks", "bias", "head_dims_80_48"])
def test_half_precision(name: str) -> None:
    problem = build(BY_NAME[name], dtype=torch.float16)
    found = results(problem)
    assert [x.dtype for x in found] == [torch.float16, torch.float32]
    decode_problems.assert_within_rule(found, problem)


@pytest.mark.in_turns
@interpreted
@pytest.mark.parametrize("slices", [2, 4, 8])
@pytest.mark.parametrize(
    "name", ["lengths", "everything", "several_queries", "mqa", "head_dims_80_48", "sixteen_queries"]
)
def test_warps_that_go_on_alone(name: str, slices: int) -> None:
    schedule = dataclasses.replace(decode_problems.SMALL, keys=16 * slices, warps=slices, slices=slices)
    problem = build(BY_NAME[name], schedule=schedule)
    decode_problems.assert_within_rule(results(problem), problem)
    assert_counted_down(problem)


#: head dims whose tiles are two of 256 dims, or less
_WIDE = (
    Case(name="wide_512", head_dim=512, batch=1, seqlen_kv=70),
    Case(name="wide_320_257", head_dim=320, head_dim_v=257, bounds=((0, 99), (0, 11))),
    Case(name="wide_384_sinks_queries", head_dim=384, seqlen_q=4, sinks=True, softcap=2.0, keys="left"),
    Case(name="wide_512_mask_mqa", head_dim=512, heads_q=7, heads_kv=1, mask="bk", bounds=((0, 120), (0, 30))),
    Case(name="wide_512_no_keys", head_dim=512, bounds=((0, 1), (0, 0)), splits=1),
    Case(name="wide_512_fp8", head_dim=512, stored="float8_e4m3fn", k_scale=0.5, v_scale=2.0),
)


@pytest.mark.in_turns
@interpreted
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("case", _WIDE, ids=lambda case: case.name)
def test_wide_heads(case: Case, sm: int) -> None:
    schedule = decode_schedule.table(build(case, dtype=torch.float16).spec, Target.fake(sm=sm))
    for problem in (build(case), build(case, dtype=torch.float16, schedule=schedule)):
        decode_problems.assert_within_rule(results(problem), problem)
        assert_counted_down(problem)


@pytest.mark.in_turns
@interpreted
@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize(
    "case",
    [
        *(case for case in _WIDE if case.head_dim_v is None and case.v_scale is None),
        *(
            BY_NAME[name]
            for name in ("plain", "lengths", "keys_left", "several_queries", "queries_mask", "head_dim_72")
        ),
    ],
    ids=lambda case: case.name,
)
def test_keys_that_are_the_values_are_read_once(case: Case, slices: int) -> None:
    schedule = dataclasses.replace(decode_problems.SMALL, keys=16 * slices, warps=slices, slices=slices)
    given = build(case, schedule=schedule)
    text = dataclasses.replace(DecodeCall.from_text(given.text), one_kv=True).to_text()
    problem = dataclasses.replace(given, v=given.k, text=text)
    found = results(problem)
    decode_problems.assert_within_rule(found, problem)
    unread = results(dataclasses.replace(problem, v=torch.full_like(given.k, torch.nan)))
    assert all(map(torch.equal, found, unread))


# ---- on a GPU, with the tiles of the table -------------------------------------------------------------------------

_TIMES = 7


def grown(case: Case) -> Case:
    """Long enough for several tiles of the table, and just as odd."""

    def longer(of_row: Any) -> Any:
        first, end = (of_row, None) if isinstance(of_row, list) else of_row
        return [(a * _TIMES, b * _TIMES) for a, b in first] if end is None else (first * _TIMES, end * _TIMES)

    bounds = None if case.bounds is None else tuple(map(longer, case.bounds))
    return dataclasses.replace(case, seqlen_kv=case.seqlen_kv * _TIMES, bounds=bounds)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [case for case in (*ALL, *_WIDE) if case.head_dim % 8 == 0 and case.head_dim_v != 257],
    ids=lambda case: case.name,
)
def test_bfloat16_on_a_gpu(case: Case) -> None:
    check_on_a_gpu(case, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["lengths", "everything", "queries_mask", "head_dim_72", "head_dim_256", "layout_odd"])
def test_other_dtypes_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    check_on_a_gpu(BY_NAME[name], dtype)


def check_on_a_gpu(case: Case, dtype: torch.dtype) -> None:
    case = grown(case)
    schedule = decode_schedule.table(build(case, dtype=dtype).spec, Target.current("cuda"))
    problem, other = (build(case, dtype=dtype, schedule=schedule, seed=seed) for seed in (0, 3))
    with planned(problem.plan):
        first = run(problem)
        decode_problems.assert_within_rule(first, problem)
        # The second call takes the kernel of the first, and other addresses.
        decode_problems.assert_within_rule(run(other), other)
        # Whichever split comes last: the sum has one order.
        assert all(map(torch.equal, first * 20, [x for _ in range(20) for x in run(problem)]))
    assert_counted_down(problem)


@pytest.mark.gpu
def test_a_cache_of_more_elements_than_fit_into_32_bits() -> None:
    case = Case(name="far", batch=2, heads_q=8, heads_kv=8, seqlen_kv=1_100_003, head_dim=128)
    q = torch.randn(2, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.empty(2, 8, case.seqlen_kv, 128, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(2))
    assert k.numel() > 2**31
    problem = build(dataclasses.replace(case, seqlen_kv=64, bounds=((0, 1), (0, 1))), dtype=torch.bfloat16)
    first, end = case.seqlen_kv - 700, case.seqlen_kv - 3
    problem.named["bounds"][0], problem.named["bounds"][1] = first, end
    found, _ = results(dataclasses.replace(problem, q=q, k=k, v=v))
    used = (x[:, :, first:end].float() for x in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), *used)
    torch.testing.assert_close(found.float(), expected, atol=1e-2, rtol=2e-2)


@pytest.mark.gpu
def test_replays_of_a_cuda_graph_follow_the_length() -> None:
    problem = build(Case(name="replayed", head_dim=64, seqlen_kv=1000, bounds=((0, 1), (0, 1))), dtype=torch.bfloat16)
    with planned(problem.plan):
        run(problem)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run(problem)
    k, v = (x.copy_(torch.randn_like(x)) for x in (problem.k, problem.v))
    filled = dataclasses.replace(problem, k=k, v=v)
    for lengths in ((1, 1000), (0, 64), (65, 640), (999, 2)):
        problem.named["bounds"][1] = torch.tensor(lengths, device="cuda")[:, None]
        graph.replay()
        decode_problems.assert_within_rule(found, filled)


@pytest.mark.gpu
def test_two_streams_at_once() -> None:
    problems = [build(Case(name="streams", head_dim=64, seqlen_kv=3000), dtype=torch.bfloat16, seed=s) for s in (0, 1)]
    with planned(problems[0].plan):
        expected = [run(problem) for problem in problems]
        streams, found = [torch.cuda.Stream() for _ in problems], []
        torch.cuda.synchronize()
        for _ in range(50):
            for problem, stream in zip(problems, streams, strict=True):
                with torch.cuda.stream(stream):
                    found.append(run(problem))
        torch.cuda.synchronize()
    for i, both in enumerate(found):
        assert all(map(torch.equal, both, expected[i % 2]))
