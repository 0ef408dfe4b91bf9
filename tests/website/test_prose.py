"""Pages that are held to plain prose: short sentences, short paragraphs, and what they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from website import prose, tables

ROOT = Path(__file__).parents[2]
#: pages that are held to it. A page joins when it passes, and none leaves.
HELD = (
    "CONTRIBUTING.md",
    "README.md",
    "docs/architecture.md",
    "docs/borders.md",
    "docs/changes.md",
    "docs/checkpoints.md",
    "docs/choosing.md",
    "docs/codes.md",
    "docs/context_parallel.md",
    "docs/cudnn.md",
    "docs/debugging.md",
    "docs/decode.md",
    "docs/decode_kernels.md",
    "docs/export.md",
    "docs/fa4.md",
    "docs/fp8.md",
    "docs/fp8_kernels.md",
    "docs/fuzzing.md",
    "docs/gain.md",
    "docs/gate.md",
    "docs/hopper.md",
    "docs/kernels.md",
    "docs/launching.md",
    "docs/linear.md",
    "docs/matching.md",
    "docs/measuring.md",
    "docs/models.md",
    "docs/numbers.md",
    "docs/packing.md",
    "docs/proving.md",
    "docs/reading.md",
    "docs/recipes.md",
    "docs/reference/api.md",
    "docs/rewrites.md",
    "docs/shared_prompts.md",
    "docs/sharing.md",
    "docs/start.md",
    "docs/supported.md",
    "docs/unpad.md",
)
#: the map is read in one go
MOST_WORDS_OF_THE_MAP = 3000
#: folders that a page may leave out in front of a path
_FOLDERS = (
    "", "attn_compiler", "attn_compiler/lowerings", "attn_compiler/lowerings/shared", "attn_compiler/lowerings/choice",
    "attn_compiler/lowerings/fp8", "attn_compiler/lowerings/hopper", "attn_compiler/passes/recovering/reading",
    "attn_compiler/lowerings/shared/kernels", "benchmarks",
)  # fmt: skip
_SOURCES = tuple(ROOT / room for room in ("attn_compiler", "benchmarks", "tests"))
#: files that a page names without their folder: those that there are, and the reader's own
_ALONE = {"make.py", *(path.name for room in _SOURCES for path in room.rglob("*.py"))}


@pytest.mark.parametrize("page", HELD)
def test_sentences_and_paragraphs_are_short(page: str) -> None:
    assert prose.too_long(tables.shown(ROOT / page)) == []


def test_the_map_is_short() -> None:
    assert len((ROOT / "docs/architecture.md").read_text(encoding="utf-8").split()) <= MOST_WORDS_OF_THE_MAP


def test_every_page_that_passes_is_held() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    short = [str(page.relative_to(ROOT)) for page in pages if not prose.too_long(tables.shown(page))]
    assert sorted(set(short) - set(HELD)) == []


def test_a_long_sentence_is_found_wherever_it_stands() -> None:
    long = " ".join(["word"] * 36) + "."
    for page in (
        long,
        f"Short. {long}",
        f"- {long}",
        f"1. Short.\n2. {long}",
        f"| a | {long} |",
        f"{long[:50]}\n{long[50:]}",
    ):
        assert len(prose.too_long(f"# Title\n\n{page}\n")) == 1, page
    assert prose.too_long(" ".join(["word"] * 35) + ".") == []


def test_a_long_paragraph_is_found_and_ends_at_a_blank_line_or_an_item() -> None:
    thirty = " ".join(["word"] * 29) + " end.\n"
    assert [each.split(":")[0] for each in prose.too_long(thirty * 5)] == ["a paragraph of 150 words"]
    assert prose.too_long(thirty * 4 + "\n" + thirty) == []
    assert prose.too_long(thirty * 4 + "- " + thirty) == []


def test_what_is_no_prose_is_not_counted() -> None:
    long = " ".join(["word"] * 40)
    assert list(prose.paragraphs(f"```\n{long}\n```\n\n# {long}\n\n    {long}\n\n<!-- {long} -->\n")) == []
    assert list(prose.paragraphs(f"See [this\npage](there.md#{'x' * 9}).")) == ["See this page."]
    assert list(prose.paragraphs("| a | b |\n|---|:--|\n| c | d |\n")) == ["a", "b", "c", "d"]
    assert list(prose.paragraphs("- one\n    two\n- three\n")) == ["one two", "three"]


def test_sentences_end_at_stops_and_not_in_names() -> None:
    found = prose.sentences("See `a/b.py` for 3.14. (Or not.) Is it? Yes: it is.")
    assert found == ["See `a/b.py` for 3.14.", "(Or not.", "Is it?", "Yes: it is."]


@pytest.mark.parametrize("page", HELD)
def test_files_that_a_page_names_are_there(page: str) -> None:
    assert [path for path in _named(tables.shown(ROOT / page)) if not _is_there(path)] == []


def test_a_file_that_is_gone_is_seen() -> None:
    named = _named(
        "`passes/pipeline/steps.py`, `passes/gone.py`, `a.b`, `FAMILY/takes.py`, `{a,b}/c.py`, `gone.py`, `steps.py` and `spec/`"
    )
    assert [path for path in named if not _is_there(path)] == ["passes/gone.py", "gone.py"]


def _named(markdown: str) -> list[str]:
    """Paths in a page: of files of Python or with numbers, and of folders. Capitals and braces stand for several."""
    return re.findall(r"`((?:[a-z0-9_]+/)+(?:[a-z0-9_]+\.(?:py|csv))?|[a-z0-9_]+\.py)`", markdown)


def _is_there(path: str) -> bool:
    return path in _ALONE or any((ROOT / folder / path).exists() for folder in _FOLDERS)
