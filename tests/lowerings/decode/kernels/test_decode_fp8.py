"""What the decode kernel makes of a cache in FP8, and of queries: in Triton's interpreter and on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from attn_compiler.lowerings.decode import schedule as decode_schedule
from attn_compiler.lowerings.decode.kernels.decode_fp8 import halves, near_the_top
from attn_compiler.spec.target import Target
from tests.lowerings.decode import problems
from tests.lowerings.decode.problems import ALL, BY_NAME, DEVICE, Case, build, results

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
def test_warps_that_go_on_alone(case: Case, slices: int) -> None:
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
