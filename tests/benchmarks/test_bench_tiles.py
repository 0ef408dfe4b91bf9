"""Benchmarks of tiles, of backwards in one order, and of whole models on a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.base import Tile, Tiles
from attn_compiler.lowerings.choice import in_order
from attn_compiler.spec.target import Target
from benchmarks import bench_h200, bench_in_order, bench_tiles, compare, harness, kernel_cases, kernel_timing, models
from benchmarks.bench_in_order import ANY_ORDER, IN_ORDER, TRITON
from benchmarks.bench_tiles import KERNELS, neighbours, row, tiles_with
from benchmarks.compare import Case
from benchmarks.kernel_cases import CASES
from benchmarks.kernel_timing import Timed

# Tiles are varied and measured one by one (Triton in its interpreter).
BY_NAME = {case.name: case for case in CASES}
TILE = Tile(queries=64, keys=128, warps=8, stages=3)
TABLE = Tiles(forward=TILE, grad_q=TILE, grad_kv=TILE)


@pytest.mark.parametrize("kernel", KERNELS)
def test_neighbours_differ_and_the_first_is_the_tile(kernel: str) -> None:
    found = neighbours(dataclasses.replace(TILE, warps=4), kernel)
    assert found[0].warps == 4
    assert len(set(found)) == len(found)
    assert any(tile.apart for tile in found) is (kernel == "dkv")


def test_forward_and_dq_visit_the_same_lists() -> None:
    small = dataclasses.replace(TILE, queries=32, keys=32)
    for kernel in ("forward", "dq"):
        tiles = tiles_with(TABLE, kernel, small)
        assert (tiles.forward.queries, tiles.forward.keys) == (tiles.grad_q.queries, tiles.grad_q.keys) == (32, 32)
        assert tiles.grad_kv == TILE
    assert tiles_with(TABLE, "dkv", small) == dataclasses.replace(TABLE, grad_kv=small)


def test_a_row_counts_allowed_pairs() -> None:
    case = BY_NAME["causal_d128_s8192"]
    found = row(case, "dkv", dataclasses.replace(TILE, apart=True), 2000.0)
    assert (found["case"], found["shape"]) == ("dkv causal_d128_s8192 apart", "B2 S8192 D128, H 16")
    assert float(found["tflops"]) == pytest.approx(2 * 4 * case.pairs * 16 * 128 / 2000.0 / 1e6, abs=0.05)


@pytest.mark.further
def test_each_kernel_is_measured_alone_and_a_later_run_is_added(tmp_path: Path) -> None:
    path = tmp_path / "tiles.csv"
    given = ["--size", "small", "--device", "cpu", "--cases", "padding_right", "--seconds", "0", "--output", str(path)]
    assert bench_tiles.main([*given, "--tiles", "32x32 w4 s1", "64x32 w4 s1"]) == 0
    assert bench_tiles.main([*given, "--kernels", "forward", "--tiles", "32x32 w4 s1"]) == 0
    found = [(one["run"], one["case"], one["tile_queries"]) for one in harness.read(path)]
    first = [("1", f"{kernel} padding_right", queries) for kernel in KERNELS for queries in ("32", "64")]
    assert found == [*first, ("2", "forward padding_right", "32")]
    assert all(float(one["us_p50"]) > 0 for one in harness.read(path))


# The benchmark of backwards in one order.
CASE = bench_in_order.CASES[0]


def _side(results: Any) -> Timed:
    return Timed(prepare=lambda: None, run=lambda _: (next(results),))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Timed]:
    """The sides of a case, on a machine that is not there."""
    ones = torch.ones(4)
    same: itertools.repeat[Tensor] = itertools.repeat(ones)
    sides = {IN_ORDER: _side(same), TRITON: _side(same)}
    sides[ANY_ORDER] = _side(ones + i * 1e-6 for i in itertools.count())
    problem = kernel_cases.build(CASE.small, device="cpu", dtype=torch.float32, training=True)
    built = bench_in_order.Built(problem=problem, hopper=[], grad_hopper=[], heads=32)

    def sides_of(built: Any, said: dict[str, str]) -> dict[str, Timed]:
        said["cudnn"] = "ImportError: no frontend"
        return sides

    monkeypatch.setattr(bench_in_order, "build", lambda case, device: built)
    monkeypatch.setattr(bench_in_order, "sides_of", sides_of)
    monkeypatch.setattr(Target, "current", lambda device: Target.fake(deterministic=True))
    return sides


GIVEN = Namespace(device="cpu", seconds=0.001)


def _rows() -> dict[str, dict[str, str]]:
    return {row["side"]: row for row in bench_in_order.measure(CASE, GIVEN)}


def test_each_side_has_a_row_that_says_whether_runs_are_alike(made: dict[str, Timed]) -> None:
    rows = _rows()
    assert set(rows) == {*made, "cudnn"}
    assert {name: row.get("same") for name, row in rows.items()} == {
        IN_ORDER: "yes", TRITON: "yes", ANY_ORDER: "no", "cudnn": None,
    }  # fmt: skip
    assert rows["cudnn"]["failure"] == "ImportError: no frontend"
    assert rows[IN_ORDER]["heads_at_once"] == "32"
    assert set().union(*rows.values()) <= set(bench_in_order.COLUMNS)
    assert not bench_in_order.failures(list(rows.values()))
    # Of the small problem: with so few positions the Triton kernels' is taken.
    assert [name for name, row in rows.items() if row.get("chosen")] == [TRITON]
    bench_in_order.print_table(list(rows.values()))


def test_other_bits_wrong_numbers_and_failures_of_ours_are_told(made: dict[str, Timed]) -> None:
    made[IN_ORDER] = _side(torch.ones(4) + i * 1e-6 for i in itertools.count())
    assert bench_in_order.failures(list(_rows().values()))
    made[IN_ORDER] = _side(itertools.repeat(torch.ones(4) * (1 + 2 * kernel_timing.MAX_ERROR)))
    assert bench_in_order.failures(list(_rows().values()))
    made[IN_ORDER] = Timed(prepare=lambda: None, run=lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    (row,) = bench_in_order.measure(CASE, GIVEN)
    assert "division" in row["failure"]
    assert bench_in_order.failures([row])


def test_what_was_measured_becomes_rows_that_decide(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    old = ["causal", "causal", "97", "128", "8192", "32", "423", "368", "2026-11-24"]
    lines = [",".join(in_order.TABLE.columns), ",".join([*old, CASE.name]), ",".join([*old, "another"])]
    path.write_text("\n".join(lines) + "\n")
    same_in_all = {"seqlen": "8192", "heads_at_once": "32", "date": "d"}
    measured = [
        {"case": name, "side": side, "tflops": tflops, "same": same, **same_in_all}
        for name, side, tflops, same in (
            (CASE.name, IN_ORDER, "430", "yes"),
            (CASE.name, TRITON, "360", "yes"),
            ("softcap_d128_s8192", IN_ORDER, "390", "yes"),
            ("softcap_d128_s8192", TRITON, "330", "yes"),
            ("softcap_d128_s8192", f"{IN_ORDER}, 32 at once", "500", "no"),
            ("window_d128_s8192", IN_ORDER, "310", "yes"),
        )
    ]
    bench_in_order.write_rows(path, measured)
    assert path.read_text().splitlines()[1:] == [
        lines[2],
        f"causal,causal,97,128,8192,32,430,360,d,{CASE.name}",
        "causal,causal,97,128,8192,32,390,330,d,softcap_d128_s8192",
    ]


FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128>>"
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_kernel0_0"
EFFICIENT = "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)"
FA4 = "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensor0"


@pytest.mark.parametrize(
    ("lowerings", "kernels", "answer"),
    [
        ("sdpa_flash x8", [FLASH], "yes"),
        ("sdpa_cudnn x8", [CUDNN], "yes"),
        ("sdpa_efficient x8", [EFFICIENT], "yes"),
        ("sdpa_cudnn x8", [FLASH], "NO"),
        ("sdpa_flash x8", [], "NO"),
        ("sdpa_flash x8", [FLASH, EFFICIENT], "NO"),
        ("sdpa_flash x4 + untouched x4", [FLASH, EFFICIENT], "yes"),
        ("sdpa_flash x4 + sdpa_efficient x4", [FLASH, EFFICIENT], "yes"),
        ("cudnn x8", [CUDNN], "yes"),
        ("fa4 x8", [FA4], "yes"),
        ("sdpa_flash x8", [FA4], "NO"),
        ("fa4 x8", [FLASH], "NO"),
        ("cudnn x8", [FLASH], "NO"),
        ("triton x8", ["attention_forward", "attention_grad_q", "attention_grad_kv"], "yes"),
        ("hopper x8", ["attention_forward_sm90", "attention_again", "attention_grad_kv"], "yes"),
        ("hopper x8", ["attention_forward_sm90", CUDNN], "yes"),
        ("hopper x8", ["attention_forward"], "NO"),
        ("triton x8", ["attention_forward_sm90"], "NO"),
        ("untouched x8", [EFFICIENT], ""),
        ("", [], ""),
    ],
)
def test_pinned_says_whether_the_named_kernels_ran_and_no_other(
    lowerings: str, kernels: list[str], answer: str
) -> None:
    assert bench_h200.pinned(lowerings, dict.fromkeys(kernels)) == answer


def test_the_plan_covers_every_family_and_calls_none_as_it_can_not_be_called() -> None:
    plan = list(bench_h200.plan(["llama", "vit"], list(models.SCENARIOS)))
    names = {(m.family, m.scenario.name) for m in plan}
    assert names == {("llama", name) for name in models.SCENARIOS} | {
        ("vit", "prefill"),
        ("vit", "train"),
        ("vit", "train_checkpointed"),
    }
    assert {m.implementation for m in plan} == {"sdpa", "eager", "flex_attention"}


def test_a_pattern_may_force_a_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = bench_h200.wanted(bench_h200.plan(["bert"], ["train"]), ["bert/sdpa/train=triton"])
    assert case.words == "bert/sdpa/train=triton"
    assert case.names["forced"] == "triton"
    asked = []
    monkeypatch.setattr(compare, "compile_both", lambda case, options: asked.append(options) or {})
    made = Case(model=torch.nn.Linear(1, 1), inputs={})
    measured = [dataclasses.replace(case, forced=forced) for forced in ("triton", "", "nothing")]
    (checkpointed,) = bench_h200.wanted(bench_h200.plan(["llama"], ["train_checkpointed"]), ["llama/sdpa/*"])
    for each in (*measured, checkpointed):
        bench_h200.compiled(made, each.options, "cpu", contextlib.nullcontext())
    assert asked == [{"lowering": "triton"}, None, None, {"checkpoint": "keep_attention"}]


def case_of(family: str, implementation: str) -> Case:
    pytest.importorskip("transformers", reason="the registry names models of transformers: pip install -e '.[models]'")
    scenario = models.SCENARIOS["prefill"]
    return bench_h200.Measured(family=family, implementation=implementation, scenario=scenario).case("small", "cpu")


@pytest.mark.parametrize(("family", "ours"), [("qwen3", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager")])
def test_flex_attention_is_beside_the_same_model_with_an_attention_of_ours(family: str, ours: str) -> None:
    case = case_of(family, "flex_attention")
    assert case.baseline is not None
    assert case.baseline.config._attn_implementation == "flex_attention"
    assert case.model.config._attn_implementation == ours
    for mine, other in zip(case.model.parameters(), case.baseline.parameters(), strict=True):
        assert mine.equal(other)
    assert case_of(family, "eager").baseline is None


def test_the_bound_is_a_model_without_attention_on_our_side() -> None:
    pytest.importorskip("transformers", reason="the registry names models of transformers: pip install -e '.[models]'")
    plan = bench_h200.plan(["bert"], ["prefill"])
    (measured,) = bench_h200.wanted(plan, ["bert/sdpa/prefill=nothing"])
    case = measured.case("small", "cpu")
    assert case.baseline is not None
    assert case.baseline.config._attn_implementation == "sdpa"
    assert case.model.config._attn_implementation == "nothing"
