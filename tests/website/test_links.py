"""Links of files in the repository, as the site has them."""

from __future__ import annotations

import pytest

from website import links


@pytest.mark.parametrize(
    ("here", "link", "expected"),
    [
        ("index.md", "docs/fp8.md#the-recipe", "fp8.md#the-recipe"),
        ("index.md", "CONTRIBUTING.md", "contributing.md"),
        ("index.md", "benchmarks/results/cpu.csv", "data/cpu.csv"),
        ("fp8.md", "../benchmarks/results/cpu.csv", "data/cpu.csv"),
        ("fp8.md", "../README.md", "index.md"),
        ("contributing.md", "docs/fuzzing.md", "fuzzing.md"),
        ("reference/api.md", "../codes.md", "../codes.md"),
        ("fp8.md", "https://arxiv.org/abs/2209.05433", "https://arxiv.org/abs/2209.05433"),
    ],
)
def test_a_link_leads_to_the_same_in_the_site(here: str, link: str, expected: str) -> None:
    assert links.mended(f"see [this]({link}).", here) == f"see [this]({expected})."


def test_the_first_sentence_is_of_prose() -> None:
    text = "# Title\n\n```python\ncode. More.\n```\n\n| a. | b |\n\nThe [first](x.md) one. The second.\n"
    assert links.first_sentence(text) == "The first one."


def test_a_picture_of_the_same_folder_stays() -> None:
    assert links.mended("# no link\n\n![a plot](plots/cpu.svg)", "plots.md") == "# no link\n\n![a plot](plots/cpu.svg)"
