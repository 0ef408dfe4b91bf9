"""The tables of gains and of releases of Triton."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attn_compiler.lowerings.shared.limits.triton_releases import COMPILED
from website import card, gains, triton_table

# README's table, its picture and the page "Will I gain?" are made from rows that were measured.
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readmes_table_is_made_from_the_rows() -> None:
    assert "\n".join(gains.readme()) in README
    assert gains.summary("held_out_h200") in README
    assert gains.summary("h200") in README
    assert gains.beside_flex() in README
    for line in gains.embedding():
        sides = re.findall(r"\w[\w ]* \d+ ms", line)
        assert [side for side in sides if (side in sides[:2] or side.startswith("ours")) and side not in README] == []


def test_a_row_that_is_not_one_is_told() -> None:
    with pytest.raises(ValueError, match="has 0 rows"):
        gains.row_of("h200", model="nobody")
    with pytest.raises(ValueError, match="rows with"):
        gains.row_of("h200", model="llama")


def test_lowerings_are_counted_by_what_they_are() -> None:
    assert list(gains._lowerings("hopper x 1; sdpa_cudnn* x 2")) == [("hopper", 1), ("sdpa_cudnn*", 2)]
    assert list(gains._lowerings("")) == []
    assert [gains._kind(name) for name in ("hopper", "sdpa_cudnn", "sdpa_cudnn*", "untouched")] == [
        "ours",
        "pinned",
        "dense",
        "none",
    ]


@pytest.mark.further
def test_the_picture_is_what_its_command_prints() -> None:
    assert (ROOT / "docs" / "images" / "card.svg").read_text(encoding="utf-8") == card.drawn() + "\n"


def test_peak_memory_is_said_of_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    llama, mini = gains.README[2], gains.README[4]
    row = {**llama.wanted, "inductor_peak_mib": "2048", "attn_compiler_peak_mib": "512"}
    monkeypatch.setattr(gains, "rows_of", lambda name: [row] if name == "memory_h200" else [])
    assert gains._peaks(llama) == "[2.0 → 0.50](benchmarks/results/memory_h200.csv)"
    assert gains._peaks(mini) == ""
    row["inductor_peak_mib"] = ""
    assert gains._peaks(llama) == ""


def test_a_dense_mask_costs_what_the_rows_say() -> None:
    rows = {row["side"]: float(row["p50_us"]) for row in gains.rows_of("select_h200") if _is_causal_256(row)}
    line = next(line for line in gains.dense_mask() if line.startswith("| 256 |"))
    assert f"| {rows['presented'] / rows['sdpa']:.1f}x / " in line
    ratios = [float(x) for line in list(gains.dense_mask())[2:] for x in re.findall(r"([\d.]+)x", line)]
    assert f"[{min(ratios)} to {max(ratios)} times as long](docs/gain.md" in README


def _is_causal_256(row: gains.Row) -> bool:
    return (row["case"], row["pass"]) == ("causal_d256_s2048", "forward") and row["p50_us"] != ""


def test_a_wrong_result_has_no_gain() -> None:
    assert gains.has_gain({"ratio": "1.2", "numerics": "ok"})
    assert gains.has_gain({"ratio": "1.2"})
    assert not gains.has_gain({"ratio": "1.2", "numerics": "WRONG"})
    assert not gains.has_gain({"ratio": "", "numerics": ""})


# The table of releases.
def test_each_release_has_a_row_for_each_family() -> None:
    rows = triton_table.table_rows()
    assert {(row[1], row[2]) for row in rows} == {
        (f"{major}.{minor}", f"`{lowering}`") for lowering, releases in COMPILED.items() for major, minor in releases
    }
    assert len({tuple(row[:3]) for row in rows}) == len(rows)


@pytest.mark.parametrize("lowering", COMPILED)
def test_what_ran_on_a_gpu_is_read_off_benchmarks(lowering: str) -> None:
    assert "H200" in triton_table.on_gpus()[(2, 11), (3, 6), lowering]


@pytest.mark.parametrize(
    ("file", "row", "lowerings"),
    [
        ("h200.csv", {"lowerings": "triton x8 + sdpa_cudnn x4"}, ["triton"]),
        ("x.csv", {"side": "hopper_fp8"}, ["hopper_fp8"]),
        ("x.csv", {"side": "rule"}, []),
        ("decode_h200.csv", {"side": "rule"}, ["decode"]),
        ("x.csv", {"lowering": "fa4", "side": None}, []),
    ],
)
def test_whose_kernels_a_row_ran(file: str, row: dict[str, str], lowerings: list[str]) -> None:
    assert list(triton_table._lowerings_of(file, row)) == lowerings


@pytest.mark.parametrize(
    ("lowering", "tested", "said"),
    [
        ("triton", ("12", "0"), "12 tests"),
        ("triton", ("11", "1"), "1 of 12 tests failed"),
        ("triton", None, "–"),
        ("hopper", None, "has no interpreter"),
    ],
)
def test_what_is_said_of_the_interpreter(lowering: str, tested: tuple[str, str] | None, said: str) -> None:
    assert triton_table._said(lowering, tested) == said
