"""Plots and tables of results, as files."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_tables, harness, plot, summary

ROW = {
    "model": "llama", "implementation": "eager", "scenario": "prefill", "dtype": "bfloat16", "device": "a device",
    "torch": "2.13.0", "lowerings": "sdpa_flash x8", "ratio": "2.0", "inductor_p50_ms": "10",
    "attn_compiler_p50_ms": "5",
}  # fmt: skip


def test_a_line_has_all_calls_of_a_model_and_the_fastest_comes_first() -> None:
    rows = [ROW, {**ROW, "model": "bert", "ratio": "3.0"}, {**ROW, "scenario": "train", "ratio": "1.5"}]
    assert plot.lines(rows, marked=True) == {"bert": {"prefill": 3.0}, "llama": {"prefill": 2.0, "train": 1.5}}
    assert list(plot.lines(rows, marked=False).items())[1:] == [
        ("llama, prefill", {"": 2.0}),
        ("llama, train", {"": 1.5}),
    ]


def test_a_dark_page_has_light_words_and_neither_has_a_ground() -> None:
    light, dark = plot.style(dark=False), plot.style(dark=True)
    assert light["text.color"] != dark["text.color"]
    assert light["savefig.facecolor"] == dark["savefig.facecolor"] == "none"


ROWS = [
    {"way": "bfloat16", "seed": "0", "step_20": "4.0", "step_40": "3.0"},
    {"way": "bfloat16", "seed": "1", "step_20": "2.0", "step_40": "1.0"},
    {"way": "block", "seed": "0", "step_20": "5.0", "step_40": ""},
]


def test_a_curve_is_the_mean_of_all_seeds_where_each_has_a_loss() -> None:
    assert plot.curves(ROWS) == {"bfloat16": [(20, 3.0), (40, 2.0)], "block": [(20, 5.0)]}


def test_others_are_held_against_bfloat16_where_both_have_a_loss() -> None:
    assert plot.above({"bfloat16": [(20, 2.0)], "block": [(20, 2.5), (40, 1.0)]}) == {"block": [(20, 25.0)]}


def rows(which: str) -> list[dict[str, str]]:
    where = {
        "device": "NVIDIA H200", "torch": "2.11.0", "cudnn": "91900", "dtype": "bfloat16", "triton": "3.6.0",
        "flash_attn_4": "", "cudnn_frontend": "",
    }  # fmt: skip
    sides = {"fa4": "100", "sdpa_cudnn": "99", "sdpa": "120", "presented": "300", "triton": ""}
    same = {**where, "case": "causal_d64_s512", "pass": which, "rounds": "9"}
    return [same | {"side": side, "p50_us": us, "chosen": "yes" * (side == "fa4")} for side, us in sides.items()]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(
    ("draw", "measured", "nothing"),
    [
        (plot.draw, [ROW, {**ROW, "ratio": "", "failure": "out of memory"}], [{**ROW, "ratio": ""}]),
        (plot.draw_learning, ROWS, []),
        (plot.draw_select, [*rows("forward"), *rows("backward")], []),
    ],
    ids=["models", "learning", "select"],
)
def test_what_was_measured_is_drawn(draw: Any, measured: Any, nothing: Any, dark: bool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing wants matplotlib: pip install -e '.[dev]'")
    draw(measured, tmp_path / "x.png", dark=dark)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing was measured"):
        draw(nothing, tmp_path / "y.png", dark=dark)


def test_a_kind_has_its_smallest_ratio_the_mean_and_the_largest() -> None:
    slower = [{**row, "case": "causal_d64_s2048"} for row in rows("forward")]
    for row in slower:
        if row["side"] == "sdpa":
            row["p50_us"] = "480"
    found = plot.spreads(plot.select_rows.replayed([*rows("forward"), *slower]))
    least, mean, most = found["causal"]["sdpa"]
    assert most / least == pytest.approx(4)
    assert mean == pytest.approx((least * most) ** 0.5)
    assert plot._kind(plot.select_rows.replayed(slower)[0]) == "causal"


def row(model: str, implementation: str, scenario: str, ratio: str, **more: str) -> dict[str, str]:
    return {
        "model": model, "implementation": implementation, "scenario": scenario, "dtype": "bfloat16", "forced": "",
        "lowerings": "fa4 x8", "inductor_p50_ms": "46.42", "attn_compiler_p50_ms": "31.51", "ratio": ratio, **more,
    }  # fmt: skip


def test_means_are_geometric_and_say_of_how_many() -> None:
    rows = [
        row("llama", "sdpa", "prefill", "2.0"),
        row("bert", "sdpa", "prefill", "8.0"),
        row("bert", "sdpa", "train_padded", "1.0"),
        row("llama", "flex_attention", "prefill", "1.5"),
    ]
    assert list(summary.means(rows)) == [
        "| Inductor with | prefill | train, padded | all | smallest |",
        "|---|---|---|---|---|",
        "| sdpa | 4.00 (2) | 1.00 (1) | 2.52 (3) | 1.00 (bert, train, padded) |",
        "| flex_attention | 1.50 (1) |  | 1.50 (1) | 1.50 (llama, prefill) |",
    ]


def test_a_row_of_the_table() -> None:
    assert list(summary.table([row("llama", "sdpa", "prefill_padded", "1.460")]))[2:] == [
        "| llama | sdpa | prefill, padded | fa4 ×8 | 46.4 | 31.5 | 1.460 |"
    ]


def test_newer_rows_count_where_they_were_measured() -> None:
    old = [row("llama", "sdpa", "train", "1.0"), row("llama", "sdpa", "prefill", "1.0")]
    new = [
        row("llama", "sdpa", "prefill", "", failure="late"),
        row("llama", "sdpa", "train", "1.5"),
        row("bert", "eager", "train", "1.2"),
    ]
    found = summary.merged(old, new)
    assert [(r["model"], r["scenario"], r["ratio"]) for r in found] == [
        ("llama", "prefill", "1.0"),
        ("llama", "train", "1.5"),
        ("bert", "train", "1.2"),
    ]


def test_files_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, newer = tmp_path / "base.csv", tmp_path / "newer.csv"
    given = {base: row("llama", "sdpa", "train", "1.0"), newer: row("llama", "sdpa", "train", "1.5", extras="a 1")}
    for path, of_file in given.items():
        harness.write(path, list(of_file), [of_file])
    assert summary.main([str(base), "--newer", str(newer)]) == 0
    (kept,) = harness.read(base)
    assert (kept["ratio"], kept["extras"]) == ("1.5", "a 1")
    assert "| llama | sdpa | train | fa4 ×8 | 46.4 | 31.5 | 1.5 |" in capsys.readouterr().out


# The benchmark of tables' gradients, of small sites on a CPU.
@pytest.mark.parametrize("mask", ["buckets", "table"])
def test_a_row_for_each_side(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_tables, "_ROUNDS", 1)
    monkeypatch.setattr(
        bench_tables,
        "SIDES",
        {"eager": None, "math": {"backend": "attn_compiler", "options": {"lowerings": ["math"], "inner": "aot_eager"}}},
    )
    table = bench_tables.Table(mask, 2, 3, 9, 8, "float32")
    eager, ours = bench_tables.measure(table, Namespace(device="cpu"))
    assert (eager["lowering"], ours["lowering"], ours.get("failure")) == ("", "math", None)
    assert float(ours["error"]) < 1e-5
    assert float(ours["differs"]) == 0
    assert set(ours) <= {*bench_tables.COLUMNS}


@pytest.mark.parametrize(
    ("side", "of_eager", "differs", "off"),
    [
        ("triton", "1.9", "0", False),
        ("triton", "2.1", "0", True),
        ("triton", "1", "1e-3", True),
        ("inductor", "9", "1", False),
    ],
)
def test_what_breaks_the_rule(side: str, of_eager: str, differs: str, off: bool) -> None:
    assert bench_tables.is_off({"side": side, "of_eager": of_eager, "differs": differs}) == off


def test_a_side_that_fails_is_a_row() -> None:
    broken = {"broken": {"backend": "no such backend"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_tables, "SIDES", broken)
        (row,) = bench_tables.measure(bench_tables.Table("table", 1, 1, 4, 8, "float32"), Namespace(device="cpu"))
    assert "no such backend" in row["failure"]
