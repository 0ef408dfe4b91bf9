"""Tables that are made of data when the site is: a line of a page that ends with `<!-- table: NAME -->` gives its place to one."""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from tests.hf import table as survey
from tests.hf.today import table as today
from tests.hf.whole import totals as whole
from tests.hf.whole.packages import PACKAGES
from website import codes, gains, options, results, supported

DOCS = Path(__file__).parents[1] / "docs"
_PLACE = re.compile(r"^.*<!-- table: (\w+) -->$", re.MULTILINE)


def _gain_summary() -> Iterator[str]:
    yield f"Held-out models, which nothing was tuned for: {gains.summary('held_out_h200')} ([each](#held-out-models))."
    yield f"The models of the tables below: {gains.summary('h200')} ([rows](../benchmarks/results/h200.csv))."
    yield "The other side is `torch.compile(model)` with the same attention ([method](measuring.md))."


def _gain_flex() -> Iterator[str]:
    yield f"Beside FlexAttention on an H200, this backend is {gains.beside_flex()} ([rows](../benchmarks/results/flex_h200.csv))."


def _ways() -> Iterator[str]:
    yield "| way | sites / in the model | masks known | what equals eager's |"
    yield "|---|---|---|---|"
    with (DOCS.parent / "tests" / "ways.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            yield f"| {row['way']} | {row['found']} / {row['there']} | {row['known']} | {row['equal']} |"


def _families() -> Iterator[str]:
    """A row a family of linear attention."""
    lines = (DOCS.parent / "tests" / "hf" / "linear_families.md").read_text(encoding="utf-8").splitlines()
    yield from (line for line in lines if line.startswith("|"))


def _studies() -> Iterator[str]:
    """Questions about speed that were answered, what was found, and where the rows are."""
    with (DOCS.parent / "benchmarks" / "studies.csv").open(newline="", encoding="utf-8") as file:
        heads, *rows = csv.reader(file)
    yield from (f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


def _surveyed(release: str = "") -> list[survey.Result]:
    return survey.read_csv(DOCS / f"survey{release}.csv")


def _whole() -> Iterator[str]:
    """Totals of each package that is surveyed as a whole."""
    for package in PACKAGES:
        yield from (f"#### {package}", "", *whole.lines(today.read_csv(DOCS / f"{package}.csv")), "")


#: by name, the text or the lines of what a page shows there
TABLES: Mapping[str, Callable[[], str | Iterable[str]]] = {
    "codes": codes.listed,
    "families": _families,
    "gain_by_card": gains.chosen,
    "gain_dense_mask": gains.dense_mask,
    "gain_eager": lambda: gains.measured("eager"),
    "gain_embedding": gains.embedding,
    "gain_flex": _gain_flex,
    "gain_sdpa": lambda: gains.measured("sdpa"),
    "gain_summary": _gain_summary,
    "glance": results.glance,
    "libraries": supported.versions,
    "machines": supported.of_machines,
    "models": lambda: today.lines(today.read_csv(DOCS / "models.csv")),
    "options": options.table,
    "ratios": results.ratios,
    "releases": supported.releases,
    "studies": _studies,
    "survey": lambda: survey.found(_surveyed()),
    "survey_other_release": lambda: survey.of_other_release(_surveyed("_transformers_4_57")),
    "survey_others": lambda: survey.others(_surveyed()),
    "takes": supported.of_lowerings,
    "ways": _ways,
    "whole": _whole,
}


@functools.cache
def made(name: str) -> str:
    """The text of one table. Raises KeyError where there is none of that name."""
    text = TABLES[name]()
    return (text if isinstance(text, str) else "\n".join(text)).rstrip()


def placed(markdown: str) -> str:
    """A page's text with its tables."""
    return _PLACE.sub(lambda found: made(found[1]), markdown)


def shown(page: Path) -> str:
    """A file's text with its tables."""
    return placed(page.read_text(encoding="utf-8"))


def names_of(markdown: str) -> list[str]:
    """The tables that a page shows."""
    return _PLACE.findall(markdown)


def pages() -> dict[str, Path]:
    """By name, the pages that show a table."""
    found = {path.relative_to(DOCS).with_suffix("").as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
    return {name: path for name, path in found.items() if names_of(path.read_text(encoding="utf-8"))}
