from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import plot

pytest.importorskip("matplotlib", reason="drawing wants matplotlib: pip install -e '.[dev]'")

ROW = {
    "model": "llama",
    "implementation": "eager",
    "scenario": "prefill",
    "dtype": "bfloat16",
    "device": "a device",
    "torch": "2.13.0",
    "lowerings": "sdpa_flash x8",
    "ratio": "2.0",
    "inductor_p50_ms": "10",
    "attn_compiler_p50_ms": "5",
}


def test_measured_rows_are_drawn(tmp_path: Path) -> None:
    plot.draw([ROW, {**ROW, "ratio": "", "failure": "out of memory"}], tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_no_measured_row_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        plot.draw([{**ROW, "ratio": ""}], tmp_path / "speed.png")
