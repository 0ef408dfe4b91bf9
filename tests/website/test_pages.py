"""Pages of the site, their links and plots."""

from __future__ import annotations

import csv
import dataclasses
import posixpath
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest

from attn_compiler.lowerings import LOWERINGS
from attn_compiler.options.options import Options
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.pages import PAGES, ExampleKind
from website import codes, gains, links, options, plots, results, supported, tables, triton_table
from website.__main__ import main
from website.gains import has_gain, rows_of

# Generated pages.
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_every_table_stands_on_a_page_and_none_is_empty() -> None:
    placed = [name for path in tables.pages().values() for name in tables.names_of(path.read_text(encoding="utf-8"))]
    assert sorted(placed) == sorted(tables.TABLES)
    assert [name for name in placed if not tables.made(name).strip()] == []
    with pytest.raises(KeyError, match="nothing"):
        tables.placed("# Page\n\n<!-- table: nothing -->\n")


def test_pages_say_the_command_that_prints_their_tables(capsys: pytest.CaptureFixture[str]) -> None:
    for name, path in tables.pages().items():
        places = [line for line in path.read_text(encoding="utf-8").splitlines() if "<!-- table:" in line]
        assert [line for line in places if f"`python -m website {name}`" not in line] == []
    main(["codes"])
    assert capsys.readouterr().out == tables.shown(DOCS / "codes.md")


def test_every_lowering_is_on_the_page_of_what_is_supported() -> None:
    text = tables.shown(DOCS / "supported.md")
    assert [x.name for x in LOWERINGS if f"`{x.name}`" not in text and x.name != "reference_fp8"] == []


def test_every_machine_attention_and_release_has_a_row() -> None:
    machines, releases = tables.made("machines"), tables.made("releases")
    assert [words for words, _ in supported._CALLED.values() if words not in machines] == []
    assert {machines.count(f"| {feature} |") for feature in ("no mask", *supported.FEATURES)} == {machines.count("## ")}
    assert [row for row in triton_table.by_release() if " | ".join(row) not in releases] == []


def test_every_code_has_one_row() -> None:
    rows = re.findall(r"^\| (AC\d+) \| (.+?) \| (.+) \|$", tables.shown(DOCS / "codes.md"), re.MULTILINE)
    assert [code for code, _, _ in rows] == [page.code for page in PAGES.values()]


def test_the_page_of_a_code_has_its_parts() -> None:
    of = PAGES[Code.DTYPE]
    text = codes.page(of, "q is float16; observed float32 (AC201)")
    for part in (f"# AC201: {of.title}", of.cause, of.remedy, "q is float16; observed float32 (AC201)"):
        assert part in text
    raises = next(page for page in PAGES.values() if page.kind is ExampleKind.RAISES)
    assert raises.example in codes.page(raises, "x")
    told = next(page for page in PAGES.values() if page.kind is ExampleKind.TOLD)
    assert "```" not in codes.page(told, None)


def test_a_page_shows_nothing_that_a_reader_can_not_run() -> None:
    assert [code for code, of in PAGES.items() if "why_not(" in codes.page(of, "x") + of.remedy] == []


def test_codes_become_links_but_in_code_in_headings_and_on_their_own_page() -> None:
    text = "# AC201\n\nAC201, `AC201` and AC999\n\n```text\nAC201\n```\n"
    linked = codes.linked(text, "codes/")
    assert linked == text.replace("\nAC201,", "\n[AC201](codes/AC201.md),")
    assert codes.linked(text, "codes/", own="AC201") == text


def test_every_option_is_described() -> None:
    words = options.described()
    assert set(words) == {field.name for field in dataclasses.fields(Options)}
    assert all(text.endswith((".", ").")) for text in words.values())
    assert "| `unpad` | `False` |" in tables.shown(DOCS / "reference/api.md")


def test_readmes_numbers_are_those_of_the_rows_that_they_link_to() -> None:
    rows = re.findall(
        r"^\|.*\| ([\d.]+) \| ([\d.]+) \| \[([\d.]+)x\]\((\S+)\) \|.*$",
        (ROOT / "README.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) == len(gains.README) >= 4
    for inductor, ours, ratio, path in rows:
        numbers = [float(x) for x in re.findall(r"(?<=,)\d+\.?\d*(?=[,\n])", (ROOT / path).read_text())]
        assert any(_rounds_to(x, inductor) for x in numbers)
        assert any(_rounds_to(x, ours) for x in numbers)
        # A row of both sides has the median of the ratios, which may be another number than the ratio of the medians.
        assert any(_rounds_to(x, ratio) for x in (*numbers, round(float(inductor) / float(ours), 2)))


def _rounds_to(number: float, text: str) -> bool:
    """Whether a number is what a text says, to the digits that it has."""
    digits = len(text.partition(".")[2])
    return abs(number - float(text)) <= 0.5001 * 10**-digits


def test_lines_of_fields_become_a_list() -> None:
    pytest.importorskip("griffe", reason="pip install -e '.[docs]'")
    from website.fields import listed

    text = "One graph.\n\nseconds: time by pass.\nfaults: what failed,\n    and where.\n\nNote that: no."
    assert (
        listed(text)
        == "One graph.\n\n- `seconds`: time by pass.\n- `faults`: what failed,\n    and where.\n\nNote that: no."
    )


# Links of files in the repository, as the site has them.
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
        ("gain.md", "../benchmarks/results/cpu.csv#L3", "rows/cpu.md#L3"),
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


def test_every_variable_that_is_read_is_on_the_page_of_options() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "attn_compiler").rglob("*.py"))
    read = re.findall(r"""(?:environ(?:\.get)?[\[(]|_VARIABLE = )["']([A-Z0-9_]+)["']""", sources)
    page = (DOCS / "reference/api.md").read_text(encoding="utf-8")
    assert {"ATTN_COMPILER_DUMP_DIR", "TRITON_INTERPRET", "DISABLE_MMA_V3"} <= set(read)
    assert [name for name in read if name not in page] == []


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
    for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", tables.shown(page)):
        led_to = page.parent / target if target else page
        if led_to.suffix == ".md" and led_to.is_file() and anchor not in _anchors(tables.shown(led_to)):
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
    text = tables.shown(ROOT / links.source_of(here))
    before = [found[1] for found in links.LINK.finditer(text)]
    after = [found[1] for found in links.LINK.finditer(links.mended(text, here))]
    both = zip(before, after, strict=True)
    return [(path, new) for old, new in both if (path := links.in_repository(old, here)) is not None]


# Plots.


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


# The page of results.


def test_what_nobody_measured_has_no_line() -> None:
    missing = results.Group(words="x", where="H200", file="no_such", of=results._ratios)
    assert missing.line() is None


def test_a_line_has_the_mean_and_the_worst_case() -> None:
    group = results.Group(words="x", where="a CPU", file="cpu", of=lambda _: [0.5, 2.0, 8.0])
    assert group.line() == "| x | a CPU | [3](../benchmarks/results/cpu.csv) | 2.00x | 1 | 0.50x |"


@pytest.mark.parametrize("group", results.GROUPS, ids=lambda group: group.words + group.where)
def test_every_ratio_is_that_of_a_row(group: results.Group) -> None:
    if not (results.RESULTS / f"{group.file}.csv").is_file():
        pytest.skip(f"{group.file}.csv was not measured yet")
    found = group.of(group.file)
    assert found
    assert len(found) <= len(rows_of(group.file))
    assert all(0.05 < ratio < 200 for ratio in found)


@pytest.mark.parametrize("source", results.SOURCES, ids=lambda source: source.file)
def test_a_ratio_leads_to_its_row_and_the_slowest_comes_first(source: results.Source) -> None:
    file = (results.RESULTS / f"{source.file}.csv").read_text(encoding="utf-8").splitlines()
    assert len(file) == len(rows_of(source.file)) + 1, "a row is a line"
    found = re.findall(r"\[([\d.]+)x\]\(\S+\.csv#L(\d+)\) \|", "\n".join(source.lines()))
    ratios = [float(ratio) for ratio, _ in found]
    assert ratios == sorted(ratios)
    assert len({number for _, number in found}) == len(found) > 1
    for ratio, number in found:
        (row,) = csv.DictReader([file[0], file[int(number) - 1]])
        assert _rounds_to(float(row[source.gain]), ratio)
        assert f"{{#L{number}}}\n\n| column | value |\n|---|---|\n" in "\n".join(source.page())


def test_held_out_models_come_first_and_a_wrong_one_has_no_gain() -> None:
    text = results.ratios()
    assert text.startswith("### Held-out models\n")
    wrong = [row for row in rows_of("held_out_h200") if not has_gain(row)]
    told = text[text.index("Wrong, or without") : text.index("### Models\n")]
    assert wrong
    assert [row for row in wrong if f"{row['model']} ({row['call']})" not in told] == []


def test_a_ratio_of_sites_is_inductors_time_over_ours() -> None:
    rows = [row for row in rows_of("sites_h200") if (row["draw"], row["number"], row["training"]) == ("0", "0", "True")]
    theirs, ours = (
        float(next(r["us_p50"] for r in rows if r["side"] == side)) for side in ("inductor", "attn_compiler")
    )
    assert theirs / ours in results._sites("sites_h200")
