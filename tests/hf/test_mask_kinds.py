"""What the survey's table of mask kinds counts."""

from __future__ import annotations

import dataclasses

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load
from attn_compiler.reasons.decisions import Decision
from attn_compiler.reporting.facts import SiteReport
from attn_compiler.reporting.report import Report
from attn_compiler.spec import masks
from attn_compiler.spec.chosen_keys import Chosen
from tests.hf import mask_kinds
from tests.lowerings.specs import make_spec

DENSE = masks.Dense(shape=(2, 1, 9, 9), dtype="bool")
PADDING = masks.KeyPadding(condition=ix.as_bool(Load("mask", (Index("b"), Index("k")), "int")))
FORMULA = masks.Formula(condition=ix.as_bool(Load("x", (Index("h"),), "int")))
LEFT = ix.invert(Load("scatter", (Index("b"), Index("q"), Index("k")), "bool"))
TOP = masks.MaskSpec(
    kinds=(PADDING,),
    dense=DENSE,
    reason="scatter holds an element for each query and key",
    rest=masks.Formula(condition=LEFT),
    chosen=Chosen(tensor="top", at=(Index("b"), Index("q")), count=3, distinct=True, condition=LEFT),
)


def _site(mask: masks.MaskSpec, modules: int = 1) -> SiteReport:
    names = tuple(f"layers.{i}" for i in range(modules))
    decision = Decision(lowering="math")
    return SiteReport(modules=names, pattern="sdpa call", spec=make_spec(mask=mask), decision=decision)


@pytest.mark.parametrize(
    ("mask", "kind", "proved"),
    [
        (masks.MaskSpec(), "no mask", False),
        (masks.MaskSpec(kinds=(masks.Causal(),), flag=masks.Flag.CALLED), "causal", True),
        (masks.MaskSpec(kinds=(masks.Causal(),), flag=masks.Flag.READ), "causal", True),
        (masks.MaskSpec(kinds=(masks.Causal(), PADDING), dense=DENSE), "causal ∧ key padding", True),
        (masks.MaskSpec(kinds=(PADDING, PADDING), dense=DENSE), "key padding", True),
        (masks.MaskSpec(kinds=(masks.Causal(), FORMULA), dense=DENSE), "causal ∧ formula", False),
        (
            masks.MaskSpec(dense=DENSE, reason="m is an input of the graph, and holds …"),
            "ready-made",
            False,
        ),
        (masks.MaskSpec(dense=DENSE, reason="m is written in place"), "dense", False),
        (masks.MaskSpec(kinds=(PADDING,), dense=DENSE, reason="m is written in place"), "key padding ∧ dense", False),
        (TOP, "key padding ∧ chosen keys", True),
        (dataclasses.replace(TOP, rest=FORMULA), "key padding ∧ dense", False),
        (dataclasses.replace(TOP, chosen=None), "key padding ∧ dense", False),
    ],
)
def test_kind_of(mask: masks.MaskSpec, kind: str, proved: bool) -> None:
    assert mask_kinds.kind_of(_site(mask)) == kind
    assert mask_kinds.is_proved(kind) == proved


def test_numbers_of_which_a_rows_highest_count_are_padding() -> None:
    site = _site(masks.MaskSpec(dense=DENSE))
    score = dataclasses.replace(site.spec.score, by_highest=True)
    assert (
        mask_kinds.kind_of(dataclasses.replace(site, spec=dataclasses.replace(site.spec, score=score))) == "key padding"
    )


def test_every_proved_kind_has_a_name() -> None:
    assert set(mask_kinds.NAMES) == set(masks.KINDS)


def test_sites_are_counted_as_often_as_their_graph_ran() -> None:
    report = Report(graph="0/0", target="cpu")
    causal = _site(masks.MaskSpec(kinds=(masks.Causal(),), flag=masks.Flag.CALLED), modules=3)
    dense = _site(masks.MaskSpec(dense=DENSE, reason="m is written in place"))
    first = dataclasses.replace(report, sites=(causal, dense))
    second = dataclasses.replace(report, sites=(dense,))
    assert mask_kinds.counted([(first, 2), (second, 1)]) == (("causal", 6), ("dense", 3))
    assert mask_kinds.reasons([first, second]) == ("m is written in place",)


def test_table_has_a_row_a_family_and_the_share_of_masks_made_in_the_graph() -> None:
    rows = [("llama", (("causal", 6), ("no mask", 5))), ("t5", (("dense", 2),)), ("llama", (("ready-made", 1),))]
    first, _, *lines = mask_kinds.table(rows)
    assert "6 of 8 (75.0%)" in first
    assert lines[0] == "| family | causal | no mask | dense | ready-made |"
    assert lines[2:] == ["| llama | 6 | 5 | – | 1 |", "| t5 | – | – | 2 | – |", "| all | 6 | 5 | 2 | 1 |"]
