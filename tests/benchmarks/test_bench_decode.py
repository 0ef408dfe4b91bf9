"""Benchmarks of kernels for decoding, latents and FP8."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import attn_compiler
from attn_compiler import CurrentScaling, Fp8Recipe
from attn_compiler.lowerings.choice import fp8_speed
from attn_compiler.lowerings.decode import plan as decode_plan, schedule as decode_schedule
from attn_compiler.lowerings.decode.plan import DecodeCall
from attn_compiler.spec.target import Target
from benchmarks import bench_decode, bench_fp8, bench_mla, decode_cases, fp8_rows, harness
from benchmarks.bench_fp8 import Side
from benchmarks.bench_mla import DRY_CASES, GPU_CASES, Problem, Stepper
from benchmarks.decode_cases import Case
from tests import numerics

H200 = Target.fake()
SMALL = Case(name="small", batch=2, length=150, filled=130, heads_q=4, heads_kv=2, head_dim=16)


CHANGES: list[dict[str, Any]] = [{}, {"window": 40}, {"seqlen_q": 3, "softcap": 2.0}]
CHANGES += [{"sinks": True, "head_dim_v": 32}, {"stored": "float8_e4m3fn"}]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_our_side_computes_what_is_expected(changes: dict[str, int]) -> None:
    problem = decode_cases.build(dataclasses.replace(SMALL, **changes), "cpu", dtype=torch.float32)
    call = bench_decode.ours(problem, decode_schedule.schedule(problem.spec, Target.fake(device="cpu")))[0]
    assert bench_decode.error(call(), decode_cases.expected(problem)) < 1e-5


@pytest.mark.parametrize("case", decode_cases.CASES, ids=lambda case: case.name)
def test_operands_are_those_that_the_lowering_would_make(case: Case) -> None:
    problem = decode_cases.build(case, "meta")
    plan = decode_plan.plan_of(DecodeCall(spec=problem.spec, schedule=decode_schedule.schedule(problem.spec, H200)))
    assert set(plan.operands) - {"count"} == set(problem.named)
    assert problem.named["bounds"].shape == (2, case.batch, case.seqlen_q)


def test_bytes_are_those_of_the_keys_in_use() -> None:
    assert decode_cases.BY_NAME["b16_4k"].bytes_used == 2 * 16 * 8 * 4096 * 256
    assert decode_cases.BY_NAME["b16_4k_half"].bytes_used == decode_cases.BY_NAME["b16_4k"].bytes_used // 2
    assert decode_cases.BY_NAME["window_b16_8k"].used == 1024


def test_a_dry_run_measures_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    assert bench_mla.main(["--dry-run"]) == 0
    assert not list(tmp_path.iterdir())


def test_sides_compute_the_same() -> None:
    made = Stepper(DRY_CASES[0], "cpu")
    torch._dynamo.reset()
    own, exact = made.compiled(harness.BACKEND)(), made.exact()
    assert numerics.worst(own, exact) < 1e-5
    # What a step adds to the cache is beyond what it starts from.
    torch.testing.assert_close(made.compiled(harness.BACKEND)(), own)


@pytest.mark.parametrize("name", ["v2_lite_b1_4k", "v3_b16_32k_half"])
def test_the_attention_alone(name: str) -> None:
    case = next(case for case in GPU_CASES if case.name == name)
    sizes = case.sizes
    spec = bench_mla.spec_of(case, "bfloat16")
    assert spec.latent is not None
    assert (spec.num_heads_q, spec.seqlen_kv, spec.latent.kept) == (sizes.heads, case.length, 576)
    problem = Problem(case=case, spec=spec, q=torch.empty(1, dtype=torch.bfloat16), caches=[])
    assert problem.bytes_used == case.batch * case.filled * 1152
    assert problem.products == 2 * case.batch * sizes.heads * case.filled * 1088
    first, *others = bench_mla.schedules(problem, Target.fake(sm=90, processors=132))
    assert first.splits is not None
    assert first not in others
    assert len(set(others)) == len(others) > 1


def test_many_heads_are_timed_with_both_kernels() -> None:
    """As in docs/decode_kernels.md."""
    kernels = {}
    for case in bench_mla.HEADS_CASES:
        spec = bench_mla.spec_of(case, "bfloat16")
        problem = Problem(case=case, spec=spec, q=torch.empty(1, dtype=torch.bfloat16), caches=[])
        rule, *others = bench_mla.schedules(problem, Target.fake(sm=90, processors=132))
        kernels[case.name] = rule.hopper
        assert not any(other.hopper for other in others)
    assert [name for name, is_for_hopper in kernels.items() if not is_for_hopper] == ["heads16_b16_4096"]
    assert len(kernels) == 9


def test_the_kernel_is_given_the_filled_part_of_a_cache() -> None:
    case = DRY_CASES[0]
    problem = Problem.of(case, "cpu", torch.float32, together=1)
    schedule = next(bench_mla.schedules(problem, Target.fake(sm=90, processors=8)))
    found = problem.calls(schedule)[0]()
    torch.testing.assert_close(found, problem.expected(), atol=1e-5, rtol=1e-4)


def test_cases_are_of_one_size() -> None:
    assert {case.batch * case.seqlen * case.heads_q * case.head_dim for case in bench_fp8.CASES} == {16384 * 2048}
    assert len({case.name for case in bench_fp8.CASES}) == len(bench_fp8.CASES)


def test_a_kernel_alone_gives_what_its_lowering_gives() -> None:
    case = dataclasses.replace(bench_fp8.case_of(64, 8192, causal=True), batch=1, heads_q=2, heads_kv=2, seqlen=96)
    q, k, v = (torch.randn(1, 96, 2, 64).half().transpose(1, 2) for _ in "qkv")
    side = Side(lowering="reference_fp8", recipe="")
    alone, whole = bench_fp8.kernel(case, side, q, k, v)(), bench_fp8.compiled(case, side)(q, k, v)
    torch.testing.assert_close(alone, whole, rtol=0, atol=0.02)


@torch._dynamo.config.patch(recompile_limit=8)  # type: ignore[attr-defined, untyped-decorator]
def test_every_side_is_compiled_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    bench_fp8.keep_all_compiled()
    case = dataclasses.replace(bench_fp8.case_of(64, 8192, causal=True), batch=1, heads_q=1, heads_kv=1, seqlen=32)
    q, k, v = (torch.randn(1, 32, 1, 64).half().transpose(1, 2) for _ in "qkv")
    recipes = {str(margin): Fp8Recipe(scaling=CurrentScaling(margin=margin)) for margin in range(len(bench_fp8.SIDES))}
    monkeypatch.setattr(bench_fp8, "RECIPES", recipes)
    given = [bench_fp8.compiled(case, Side(lowering="reference_fp8", recipe=recipe)) for recipe in recipes]
    attn_compiler.reset()
    for function in given:
        function(q, k, v)
    assert len(attn_compiler.reports()) == len(bench_fp8.SIDES) > 8


def test_a_wrong_side_is_marked_and_fails() -> None:
    good = {"case": "a", "pass": "forward", "side": "x", "recipe": "", "part": "whole", "error": "0.03", "tflops": "1"}
    assert not bench_fp8.is_wrong(good)
    assert bench_fp8.is_wrong(good | {"error": "0.5"})
    assert "WRONG" in bench_fp8._cell(good | {"error": "0.5"})
    bench_fp8.print_table([good])


def test_a_job_that_died_is_a_row_with_the_failure() -> None:
    job = bench_fp8.Job(case=bench_fp8.CASES[0], which="forward", device="cuda", seconds=0.1)
    (row,) = bench_fp8.rows_of(job, {"failure": "its process died"})
    assert row["failure"] == "its process died"
    assert set(row) <= set(bench_fp8.COLUMNS)
    assert bench_fp8.rows_of(job, {"rows": '[{"case": "a"}]'}) == [{"case": "a"}]


FP8 = [
    {"case": "causal_d128_s8192", "head_dim": "128", "seqlen": "8192", "date": "2026-11-21", "recipe": "", "part": part}
    | {"pass": "forward", "side": side, "tflops": tflops, "heads_q": "16", "heads_kv": "16"}
    | {"batch": "2", "pairs": str(8192 * 8193)}
    for side, part, tflops in (
        ("sdpa_cudnn", "whole", "600"),
        ("hopper_fp8", "whole", "700"),
        ("hopper_fp8", "kernel", "800"),
        ("hopper_fp8", "alone", ""),
    )
]
SELECT = [
    {"case": "causal_d128_s8192", "pass": which, "side": side, "p50_us": us, "tflops": tflops}
    for which, side, us, tflops in (
        ("forward", "sdpa_cudnn", "1000", "500"),
        ("forward", "fa4", "800", "625"),
        ("backward", "sdpa_cudnn", "2500", "500"),
        ("backward", "fa4", "2000", "625"),
    )
]


@pytest.mark.parametrize("training", [False, True])
def test_speeds_of_another_run_are_placed_beside_cudnns(training: bool) -> None:
    """Training is forward and backward together. What was measured beside FP8 is not placed."""
    fp8 = [row | {"pass": "both" if training else "forward"} for row in FP8]
    rows = {row["lowering"]: row for row in fp8_rows.rows_of(fp8, SELECT)}
    speeds = {"sdpa_cudnn": "600", "hopper_fp8": "700", "fa4": "750"}
    assert {name: row["tflops"] for name, row in rows.items()} == speeds
    assert {row["training"] for row in rows.values()} == {"yes" if training else "no"}
    assert {row["grouped"] for row in rows.values()} == {"no"}
    assert {row["keys"] for row in rows.values()} == {"4096.5"}
    assert (rows["fa4"]["head_dim_from"], rows["fa4"]["head_dim_to"]) == ("65", "128")
    beside = {
        row["lowering"]: row for row in fp8_rows.rows_of([*fp8, fp8[0] | {"side": "fa4", "tflops": "690"}], SELECT)
    }
    assert beside["fa4"]["tflops"] == "690"


def test_one_shape_may_have_two_names() -> None:
    sizes = {"batch": "2", "heads_q": "16", "heads_kv": "16", "seqlen": "8192", "head_dim": "128", "head_dim_v": "128"}
    shape = {**sizes, "pairs": str(8192 * 8193)}
    fp8 = [{**row, **shape, "case": "causal_d128_s8192_other"} for row in FP8]
    rows = {row["lowering"]: row for row in fp8_rows.rows_of(fp8, [{**row, **shape} for row in SELECT])}
    assert rows["fa4"]["tflops"] == "750"
    apart = [{**row, **shape, "pairs": "7"} for row in SELECT]
    assert "fa4" not in {row["lowering"] for row in fp8_rows.rows_of(fp8, apart)}


def test_the_file_holds_what_was_measured() -> None:
    """But for what comes from another file, whose rows may have become others since."""
    made = fp8_rows.rows_of(harness.read(bench_fp8.RESULTS), [])
    kept = harness.read(fp8_speed.TABLE.path)
    ours, theirs = ([row for row in rows if row["lowering"] not in fp8_rows.OTHERS] for rows in (kept, made))
    assert ours == theirs
