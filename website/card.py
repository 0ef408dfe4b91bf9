"""The picture of the README: what a report shows of one model, and what it gained.

python -m website.card > docs/images/card.svg

Masks are those that `explain` proves of the benchmark's own model, on the meta device. Times and the kernel are those of a row of
benchmarks/results/h200.csv.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

import attn_compiler
from attn_compiler.reporting.facts import SiteReport
from attn_compiler.reporting.page.drawing import drawing, hatching, share
from attn_compiler.reporting.page.examples import drawable
from attn_compiler.reporting.page.grid import grid_of
from attn_compiler.reporting.page.markup import Content, Markup, element
from benchmarks import models
from website import gains

MODEL, IMPLEMENTATION, SCENARIO = "gemma2", "eager", "prefill_padded"
_TITLE = "Gemma 2, a padded batch of 4 × 4096"
_DETAILS = "eager attention, 4 layers, bfloat16"
#: narrow, so that its words can be read where a phone makes it narrower still
_WIDTH, _HEIGHT = 620, 568
#: of the page of a report (reporting/page/page.css), in light and in dark
_STYLE = """
:root{--page:#fff;--text:#1a1f26;--quiet:#4f5b67;--line:#cfd6dd;--accent:#0a53be;--kept:#8a95a1;
--skipped:#fff;--taking:#9cc3f5;--fully:#1f5fbf;--hatch:#123a78;--borders:#7d8896}
@media(prefers-color-scheme:dark){:root{--page:#11151a;--text:#e7ebf0;--quiet:#a9b4c0;--line:#38424d;--accent:#8fb8ff;--kept:#7d8896;
--skipped:#11151a;--taking:#2f568f;--fully:#8fb8ff;--hatch:#c9ddff;--borders:#66727f}}
text{font:14px system-ui,-apple-system,"Segoe UI",sans-serif;fill:var(--text)}
.mask text{font-size:12px;fill:var(--quiet)}.quiet{fill:var(--quiet)}.title{font-size:17px;font-weight:600}
.small{font-size:11px}.large{font-size:34px;font-weight:700;fill:var(--accent)}.ours{fill:var(--accent)}.theirs{fill:var(--kept)}
.ground{fill:var(--page);stroke:var(--line)}.skipped{fill:var(--skipped)}.taking{fill:var(--taking)}
.fully{fill:var(--fully);fill-opacity:.55}.partly{fill:url(#hatch)}.hatch{stroke:var(--hatch);stroke-width:1}
.borders{stroke:var(--borders);stroke-width:.4;fill:none}.frame{fill:none;stroke:var(--borders)}
"""


def sites() -> list[SiteReport]:
    """One of each kind, as `explain` finds it."""
    model = models.build(MODEL, "full", IMPLEMENTATION, torch.bfloat16, device="meta")
    given = models.example_inputs(MODEL, "full", models.SCENARIOS[SCENARIO], dtype=torch.bfloat16, device="meta")
    with torch.no_grad():
        reports = attn_compiler.explain(model, **given)
    return [site for report in reports for site in report.sites]


def drawn() -> str:
    """The card as an SVG of its own."""
    found = sites()
    row = gains.row_of("h200", model=MODEL, implementation=IMPLEMENTATION, scenario=SCENARIO)
    parts: list[Content] = [
        element("title", f"{_TITLE}: {float(row['ratio']):.2f} times as fast as Inductor on an {row['device']}"),
        element("style", Markup(_STYLE)),
        hatching(),
        _rect(0.5, 0.5, _WIDTH - 1, _HEIGHT - 1, "ground", rx="10"),
        _text(24, 36, _TITLE, "title"),
        _text(24, 58, f"{_DETAILS}, {found[0].spec.score.words}", "quiet"),
    ]
    for place, site in enumerate(found):
        parts += _mask(site, 24 + place * 300, place)
    parts += _times(row)
    return element(
        "svg",
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        width=str(_WIDTH),
    )


def _mask(site: SiteReport, x: float, place: int) -> Iterator[Markup]:
    example = drawable(site.spec.mask, site.spec.seqlen_q, site.spec.seqlen_kv)
    grid = grid_of(example)
    layers = f"{len(site.modules)} layers"
    picture = drawing(grid, f"The mask of {layers}", f"mask-{place}")
    placed = str(picture).replace("<svg ", f'<svg x="{x:g}" y="176" width="270" height="258" ', 1)
    yield Markup(placed)
    words, padding = site.spec.mask.words.partition(" (proved)")[0].rsplit(" ∧ ", 1)
    yield _text(x, 456, f"{layers}: {words} ∧")
    yield _text(x, 475, padding)
    yield _text(x, 494, f"proved; {share(grid)} of the pairs take part", "quiet")
    drawn_with = next(words for words in example.made_up if words.startswith("attention_mask"))
    yield _text(x, 513, "where " + drawn_with, "quiet small")


def _times(row: gains.Row) -> Iterator[Markup]:
    theirs, ours = (float(row[f"{side}_p50_ms"]) for side in ("inductor", "attn_compiler"))
    yield _text(24, 120, f"{float(row['ratio']):.2f}x", "large")
    yield _text(24, 144, "as fast as Inductor", "quiet")
    for y, name, class_, each in ((92, "Inductor", "theirs", theirs), (134, "attn_compiler", "ours", ours)):
        yield _text(200, y, f"{name}: {each:.1f} ms")
        yield _rect(200, y + 7, 390 * each / max(theirs, ours), 14, class_, rx="3")
    kernel, _, layers = row["lowerings"].partition(" x")
    where = f"{row['device']}, torch {row['torch'].partition('+')[0]}, {row['date']}"
    yield _text(24, 548, f"chosen: {kernel}, in {layers} layers; measured on an {where}", "quiet")


def _text(x: float, y: float, words: str, class_: str | None = None) -> Markup:
    return element("text", words, x=f"{x:g}", y=f"{y:g}", class_=class_)


def _rect(x: float, y: float, width: float, height: float, class_: str, rx: str) -> Markup:
    return element("rect", x=f"{x:g}", y=f"{y:g}", width=f"{width:.5g}", height=f"{height:g}", class_=class_, rx=rx)


if __name__ == "__main__":
    sys.stdout.write(drawn() + "\n")
