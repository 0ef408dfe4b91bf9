from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import plot_select


def rows(which: str) -> list[dict[str, str]]:
    where = {
        "device": "NVIDIA H200",
        "torch": "2.11.0",
        "cudnn": "91900",
        "dtype": "bfloat16",
        "triton": "3.6.0",
        "flash_attn_4": "",
        "cudnn_frontend": "",
    }
    sides = {"fa4": "100", "sdpa_cudnn": "99", "sdpa": "120", "presented": "300", "triton": ""}
    return [
        {
            **where,
            "case": "causal_d64_s512",
            "pass": which,
            "side": side,
            "p50_us": took,
            "rounds": "9",
            "chosen": "yes" * (side == "fa4"),
        }
        for side, took in sides.items()
    ]


def test_draws_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_select.draw([*rows("forward"), *rows("backward")], tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_measured_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="nothing was measured"):
        plot_select.draw([], tmp_path / "x.png")


def test_a_kind_has_its_smallest_ratio_the_mean_and_the_largest() -> None:
    slower = [{**row, "case": "causal_d64_s2048"} for row in rows("forward")]
    for row in slower:
        if row["side"] == "sdpa":
            row["p50_us"] = "480"
    found = plot_select.spreads(plot_select.select_rows.replayed([*rows("forward"), *slower]))
    least, mean, most = found["causal"]["sdpa"]
    assert most / least == pytest.approx(4)
    assert mean == pytest.approx((least * most) ** 0.5)
    assert plot_select._kind(plot_select.select_rows.replayed(slower)[0]) == "causal"
