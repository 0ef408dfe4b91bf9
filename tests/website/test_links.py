"""Links of files in the repository, as the site has them."""

from __future__ import annotations

import posixpath
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest

from website import links

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("here", "link", "expected"),
    [
        ("index.md", "docs/fp8.md#the-recipe", "fp8.md#the-recipe"),
        ("index.md", "CONTRIBUTING.md", "contributing.md"),
        ("index.md", "benchmarks/results/cpu.csv", "data/benchmarks/results/cpu.csv"),
        ("fp8.md", "../benchmarks/results/cpu.csv", "data/benchmarks/results/cpu.csv"),
        ("context_parallel.md", "../tests/conftest.py", "data/tests/conftest.py"),
        ("reference/api.md", "../../attn_compiler/reporting/report.py", "../data/attn_compiler/reporting/report.py"),
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


def test_no_link_of_a_page_leads_out_of_the_site() -> None:
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    outside = [
        f"{here}: {target}"
        for here in [*pages, *links.OUTSIDE.values()]
        for _, target in _targets(here)
        if posixpath.normpath(posixpath.join(posixpath.dirname(here), target)).startswith("..")
    ]
    assert outside == []


def test_what_is_copied_is_there() -> None:
    """Under its whole path: two files of one name are two."""
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    found = {path for here in pages for path, _ in _targets(here) if path.startswith(links.COPIED)}
    assert {path for path in found if not (ROOT / path).is_file()} == set()
    assert len({links.copy_of(path) for path in found}) == len(found)
    assert any(path.startswith("tests/") for path in found)


def test_anchors_of_links_are_headings() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    assert [f"{page.name}: {target}#{anchor}" for page in pages for target, anchor in _lost(page)] == []


def test_an_anchor_that_is_gone_is_seen(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# One\n\n```\n# two\n```\n\n## `three`, a [four](x.md) – five\n")
    page.write_text(
        "# Here\n\n[a](#here) [b](other.md#one) [c](other.md#two) [d](other.md#three-a-four-five) [e](#one)\n"
    )
    assert list(_lost(page)) == [("other.md", "two"), ("", "one")]


def _lost(page: Path) -> Iterator[tuple[str, str]]:
    """Links of a page with anchors that no heading of their page has. A page that is not there is test_docs.py's."""
    for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")):
        led_to = page.parent / target if target else page
        if led_to.suffix == ".md" and led_to.is_file() and anchor not in _anchors(led_to.read_text(encoding="utf-8")):
            yield target, anchor


def _anchors(markdown: str) -> set[str]:
    """As the site makes them of headings."""
    prose = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    given = re.findall(r'(?:id="|\{#)([\w-]+)', prose)
    return {_slug(heading) for heading in re.findall(r"^#+ (.+)$", prose, re.MULTILINE)} | set(given)


def _slug(heading: str) -> str:
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    plain = unicodedata.normalize("NFKD", words).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def _targets(here: str) -> list[tuple[str, str]]:
    """Of each link of a page to the repository: the file's path there, and the link in the site."""
    text = (ROOT / links.source_of(here)).read_text(encoding="utf-8")
    before = [found[1] for found in links.LINK.finditer(text)]
    after = [found[1] for found in links.LINK.finditer(links.mended(text, here))]
    both = zip(before, after, strict=True)
    return [(path, new) for old, new in both if (path := links.in_repository(old, here)) is not None]
