"""What a log says of a report, in a line."""

from __future__ import annotations

import dataclasses

from attn_compiler import index_expr as ix
from attn_compiler.reporting import wording
from attn_compiler.spec import masks
from tests.reporting.test_render import REPORT, SITE, SPEC, TARGET


def test_summary_is_one_line() -> None:
    assert wording.summary(REPORT) == f"graph 0/0 on {TARGET}: 32 attention sites (sdpa 32), 1 miss, 125 ms in passes"


def test_the_first_line_of_a_process_names_masks_and_lowerings() -> None:
    assert wording.introduction(REPORT) == (
        f"{wording.summary(REPORT)}; by mask: 32 × causal: sdpa; attn_compiler.reports().save('report.html') shows why"
    )


def test_the_first_line_of_a_process_stays_a_line() -> None:
    long = masks.MaskSpec(kinds=(masks.Formula(condition=ix.Load("a_name_" * 20, (ix.Index("q"),), "bool")),))
    sites = tuple(
        dataclasses.replace(SITE, pattern=str(n), spec=dataclasses.replace(SPEC, mask=long)) for n in range(9)
    )
    line = wording.introduction(dataclasses.replace(REPORT, sites=sites))
    assert "5 more kinds" in line
    assert "\n" not in line
    assert len(line) < 700
