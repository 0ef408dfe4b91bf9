from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import plot

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


@pytest.mark.parametrize("dark", [False, True])
def test_measured_rows_are_drawn(tmp_path: Path, dark: bool) -> None:
    pytest.importorskip("matplotlib", reason="drawing wants matplotlib: pip install -e '.[dev]'")
    plot.draw([ROW, {**ROW, "ratio": "", "failure": "out of memory"}], tmp_path / "speed.png", dark=dark)
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_no_measured_row_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing wants matplotlib: pip install -e '.[dev]'")
    with pytest.raises(ValueError, match="nothing was measured"):
        plot.draw([{**ROW, "ratio": ""}], tmp_path / "speed.png")


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
