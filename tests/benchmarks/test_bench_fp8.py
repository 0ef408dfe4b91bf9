from __future__ import annotations

import dataclasses

import pytest
import torch

import attn_compiler
from attn_compiler import CurrentScaling, Fp8Recipe
from benchmarks import bench_fp8
from benchmarks.bench_fp8 import Side


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
    assert bench_fp8.failures([good]) == 0
    assert bench_fp8.failures([good, good | {"error": "0.5"}]) == 1
    assert "WRONG" in bench_fp8._cell(good | {"error": "0.5"})
    bench_fp8.print_table([good])


def test_a_job_that_died_is_a_row_with_the_failure() -> None:
    job = bench_fp8.Job(case=bench_fp8.CASES[0], which="forward", device="cuda", seconds=0.1)
    (row,) = bench_fp8.rows_of(job, {"failure": "its process died"})
    assert row["failure"] == "its process died"
    assert set(row) <= set(bench_fp8.COLUMNS)
    assert bench_fp8.rows_of(job, {"rows": '[{"case": "a"}]'}) == [{"case": "a"}]
