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
