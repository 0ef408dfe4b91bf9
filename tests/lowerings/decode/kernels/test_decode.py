"""The decode kernel's numbers: every part of a plan, a cache in FP8, and what becomes of results."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from attn_compiler.lowerings.decode import schedule as decode_schedule
from attn_compiler.lowerings.decode.kernels.decode_fp8 import halves, near_the_top
from attn_compiler.lowerings.decode.kernels.results import first_half, joined
from attn_compiler.lowerings.decode.plan import DecodeCall
from attn_compiler.spec.target import Target
from tests.lowerings.decode import problems, problems as decode_problems
from tests.lowerings.decode.problems import ALL, BY_NAME, DEVICE, Case, Problem, build, planned, results, run

pytest.importorskip("triton")

# The decode kernel's numbers.
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


# What the decode kernel makes of a cache in FP8, and of queries.
FP8_CASES = [case for case in ALL if case.stored is not None]
#: heads that are pairs as a whole
WIDE = [
    dataclasses.replace(case, name=f"{case.name}_wide", head_dim=32, head_dim_v=64)
    for case in FP8_CASES
    if case.head_dim_v is None
]
ON_GPU = DEVICE == "cuda"
_TL = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def _halves(Pairs, First, Second, SIZE: tl.constexpr, FP8: tl.constexpr, COMPILED: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    first, second = halves(tl.load(Pairs + at), FP8, COMPILED)
    tl.store(First + at, first)
    tl.store(Second + at, second)


@pytest.mark.parametrize("dtype", _TL, ids=str)
def test_every_pair_is_both_its_numbers(dtype: torch.dtype) -> None:
    """All 65536 of them, what is no number too."""
    size = 2**16
    pairs = torch.arange(size, dtype=torch.int32).to(torch.int16).to(DEVICE)
    first, second = (torch.empty(size, dtype=torch.float16, device=DEVICE) for _ in range(2))
    _halves[(size // 1024,)](pairs, first, second, SIZE=1024, FP8=_TL[dtype], COMPILED=ON_GPU)
    right = pairs.view(torch.uint8).view(dtype).reshape(size, 2).to(torch.float16)
    found = torch.stack([first, second], 1)
    if not ON_GPU and dtype == torch.float8_e4m3fn:
        # Triton's interpreter makes a number of that dtype's NaN.
        found = found.where(right.isfinite(), torch.nan)
    torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)


@triton.jit
def _near(Q, Out, Back, ROWS: tl.constexpr, DIMS: tl.constexpr):
    rows, dims = tl.arange(0, ROWS)[:, None], tl.arange(0, DIMS)[None, :]
    q = tl.load(Q + rows * DIMS + dims)
    near, _, back = near_the_top(q, q, 1)
    tl.store(Out + rows * DIMS + dims, near)
    tl.store(Back + rows, back)


def test_rows_of_any_size_become_float16_and_back() -> None:
    sizes = torch.tensor([1.0, 0.0, 2.0, 3e38, 1e-35, 7e4, 1e-5, 448.0]).to(DEVICE)
    numbers = torch.randn(len(sizes), 16, generator=torch.Generator().manual_seed(0)).to(DEVICE).clamp(-1, 1)
    q = (numbers * sizes[:, None]).to(torch.bfloat16)
    near, back = torch.empty_like(q, dtype=torch.float16), torch.empty(len(sizes), 1, device=DEVICE)
    _near[(1,)](q, near, back, ROWS=len(sizes), DIMS=16)
    assert bool(near.isfinite().all())
    usual = q.abs().amax(1) > 1e-30
    assert bool((near.abs().amax(1)[usual] >= 2.0**14).all())
    found = near.double() * back.double()
    assert bool(((found - q.double()).abs() <= 2.0**-22 * q.double().abs().amax(1, keepdim=True)).all())


def check(case: Case, dtype: torch.dtype, *, slices: int = 1, large: float = 1.0) -> None:
    schedule = dataclasses.replace(problems.SMALL, keys=16 * max(slices, 2), warps=max(slices, 4), slices=slices)
    if ON_GPU:
        schedule = decode_schedule.table(build(case, dtype=dtype).spec, Target.current("cuda"))
    problem = build(case, dtype=dtype, schedule=schedule)
    # The rows of one tile far apart.
    problem.q[:, 0] *= large
    problems.assert_within_rule(results(problem), problem)


@pytest.mark.in_turns
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [*FP8_CASES, *WIDE], ids=lambda case: case.name)
def test_products_in_float16(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@pytest.mark.in_turns
@pytest.mark.parametrize("slices", [2, 4])
@pytest.mark.parametrize("case", [*WIDE, BY_NAME["fp8_head_dims_80_48"]], ids=lambda case: case.name)
def test_warps_that_go_on_alone_fp8(case: Case, slices: int) -> None:
    check(case, torch.bfloat16, slices=slices)


@pytest.mark.parametrize("large", [2.0**-40, 2.0**40, 2.0**120])
def test_queries_beyond_what_float16_holds(large: float) -> None:
    case = dataclasses.replace(BY_NAME["fp8_scaled"], name=f"large_{large:g}", k_scale=0.5, head_dim=64)
    check(case, torch.bfloat16, large=large)


def test_a_long_row_of_small_weights() -> None:
    """The peak is far above all others, which together count as much: in float16 as it is, each would be 0."""
    case = Case(name="small_weights", head_dim=64, seqlen_kv=4096, stored="float8_e4m3fn", splits=2)
    problem = build(case, dtype=torch.bfloat16)
    problem.q.fill_(1.0)
    k, v = problem.k, problem.v
    k.copy_(torch.zeros_like(k, dtype=torch.float32))
    k[:, :, 7] = torch.full_like(k[:, :, 7], 2.25, dtype=torch.float32)
    v.copy_(torch.ones_like(v, dtype=torch.float32))
    v[:, :, 7] = torch.zeros_like(v[:, :, 7], dtype=torch.float32)
    out, _ = results(problem)
    weight = torch.exp(torch.tensor(-2.25 * 64 * case.scale_used))
    expected = 4095 * weight / (1 + 4095 * weight)
    torch.testing.assert_close(out.float(), torch.full_like(out.float(), float(expected)), rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", ["float8_e5m2", pytest.param("float8_e4m3fn", marks=pytest.mark.gpu)])
def test_what_is_no_number_stays_none(dtype: str) -> None:
    problem = build(Case(name=f"nan_{dtype}", head_dim=32, stored=dtype), dtype=torch.bfloat16)
    problem.v[0, 1, 40, 3] = torch.nan
    out, _ = results(problem)
    assert bool(out[0, 2:, :, 3].isnan().all())
    assert bool(out[:, :2].isfinite().all())


# What becomes of the results of a tile's rows and of warps that went on alone.
ROWS, WIDTH = 16, 32


@triton.jit
def _of_slices(Total, Peak, X, Out, Lse, SLICES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    rows = tl.arange(0, SLICES)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    x = tl.load(X + rows[:, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :])
    total, peak = (
        first_half(tl.load(Total + rows), SLICES, ROWS // 2),
        first_half(tl.load(Peak + rows), SLICES, ROWS // 2),
    )
    total, peak, out, _ = joined(total, peak, first_half(x, SLICES, ROWS // 2), x, SLICES, 0)
    kept = tl.arange(0, ROWS // 2)
    tl.store(Lse + kept, peak + tl.log2(total))
    tl.store(Out + kept[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], out / total[:, None])


@pytest.mark.parametrize("slices", [2, 4, 8])
def test_slices_are_joined_by_their_weights(slices: int) -> None:
    torch.manual_seed(slices)
    x = torch.randn(slices, ROWS, WIDTH, device=DEVICE)
    total, peak = (torch.rand(slices, ROWS, device=DEVICE) + 0.5, torch.randn(slices, ROWS, device=DEVICE) * 9)
    # A slice whose keys are all masked.
    total[1, 3], peak[1, 3], x[1, 3] = 0.0, -torch.inf, 0.0
    out, lse = torch.empty(ROWS // 2, WIDTH, device=DEVICE), torch.empty(ROWS // 2, device=DEVICE)
    _of_slices[(1,)](total, peak, x, out, lse, SLICES=slices, ROWS=ROWS, WIDTH=WIDTH, num_warps=slices)
    scale = 2.0 ** (peak - peak.amax(0))
    weight = (total * scale).sum(0)
    torch.testing.assert_close(out, ((x * scale[..., None]).sum(0) / weight[:, None])[: ROWS // 2])
    torch.testing.assert_close(lse, (peak.amax(0) + weight.log2())[: ROWS // 2])


@triton.jit
def _of_rows(X, Out, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    kept = tl.arange(0, ROWS // 2)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(Out + kept, first_half(tl.load(X + at), 1, ROWS // 2))


def test_the_first_half_of_rows_that_all_warps_share() -> None:
    x = torch.randn(ROWS, WIDTH, device=DEVICE)
    out = torch.empty(ROWS // 2, WIDTH, device=DEVICE)
    _of_rows[(1,)](x, out, ROWS=ROWS, WIDTH=WIDTH)
    assert torch.equal(out, x[: ROWS // 2])
