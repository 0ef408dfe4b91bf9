"""Plots: their rows are those of a CSV, each is drawn for a light and for a dark page, and pages get them by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from website import plots

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["h200", "cpu", "unpad"])
def test_the_rows_of_a_plot_are_those_of_its_csv(name: str) -> None:
    rows = [row for row in plots.given(name) if row["ratio"]]
    assert rows
    for row in rows:
        assert float(row["ratio"]) == pytest.approx(
            float(row["inductor_p50_ms"]) / float(row["attn_compiler_p50_ms"]), rel=0.1
        )


def test_a_plot_is_drawn_for_a_light_and_for_a_dark_page_and_again_the_same() -> None:
    pytest.importorskip("matplotlib", reason="pip install -e '.[docs]'")
    light, dark = (plots.drawn("unpad", dark=dark) for dark in (False, True))
    assert light.lstrip().startswith("<?xml")
    assert light != dark
    assert "#1a1f26" in light
    assert "#e7ebf0" in dark
    without_date = (re.sub(r"<dc:date>.*?</dc:date>", "", text) for text in (dark, plots.drawn("unpad", dark=True)))
    assert len(set(without_date)) == 1


def test_a_page_gets_a_plot_where_it_names_one() -> None:
    assert plots.placed("a\n<!-- plot: cpu -->\nb", "benchmarks.md") == (
        "a\n"
        "![Speed against Inductor on a CPU](plots/cpu_light.svg#only-light)\n"
        "![Speed against Inductor on a CPU](plots/cpu_dark.svg#only-dark)\n"
        "b"
    )
    assert "](../plots/cpu_light.svg" in plots.placed("<!-- plot: cpu -->", "codes/AC101.md")
    with pytest.raises(KeyError):
        plots.placed("<!-- plot: none -->", "benchmarks.md")


def test_every_plot_stands_on_a_page() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    assert set(re.findall(r"<!-- plot: (\w+) -->", text)) == set(plots.PLOTS)
