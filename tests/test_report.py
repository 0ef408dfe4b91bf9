"""Reports as data: the JSON's schema, and merging."""

from __future__ import annotations

import dataclasses
import json

import pytest

from attn_compiler import masks, scores
from attn_compiler.decisions import Copy, Decision, Reason, Refusal
from attn_compiler.report import MissReport, Report, Reports, SiteReport
from attn_compiler.spec import AttentionSpec, TensorSpec

QKV = TensorSpec(shape=(2, 4, "s0", 8), strides=("32*s0", 8, 32, 1), dtype="float32", requires_grad=True)
SPEC = AttentionSpec(
    q=QKV,
    k=QKV,
    v=QKV,
    mask=masks.MaskSpec(kinds=(masks.Causal(alignment=masks.Alignment.BOTTOM_RIGHT),), flag=masks.Flag.CALLED),
    score=scores.ScoreSpec(scale=0.5),
    device="cpu",
    out_dtype="float32",
)


def make_report(graph: str = "0/0", lowering: str = "sdpa") -> Report:
    reason = Reason(rule="rule", observed="observed", remedy=None)
    site = SiteReport(
        modules=("a.0", "a.1", "a.2"),
        pattern="sdpa",
        spec=SPEC,
        decision=Decision(lowering=lowering, refusals=(Refusal(lowering="cudnn", reasons=(reason,)),)),
        copies=(Copy(operand="q", bytes=None, why="why"),),
        notes=("note",),
    )
    miss = MissReport(
        modules=("b", "c"),
        anchor="softmax",
        nearest="softmax_matmul",
        stopped_at="scale",
        reason=reason,
        source="m.py:1",
    )
    return Report(
        graph=graph,
        target="cpu",
        sites=(site,),
        misses=(miss,),
        seconds=(("match", 0.5), ("lower", 0.25)),
        kernels=(("attention_forward", 1.5),),
    )


def test_json_has_every_field_under_its_name() -> None:
    assert json.loads(make_report().to_json()) == {
        "version": 1,
        "graph": "0/0",
        "target": "cpu",
        "num_sites": 3,
        "num_misses": 2,
        "sites": [
            {
                "modules": ["a.0", "a.1", "a.2"],
                "pattern": "sdpa",
                "spec": json.loads(SPEC.to_text()),
                "mask": "causal (bottom-right)",
                "mask_formula": None,
                "mask_unproved": None,
                "score": "scale 0.5",
                "score_added": None,
                "lowering": "sdpa",
                "refusals": [
                    {"lowering": "cudnn", "reasons": [{"rule": "rule", "observed": "observed", "remedy": None}]}
                ],
                "copies": [{"operand": "q", "bytes": None, "why": "why"}],
                "notes": ["note"],
                "source": None,
                "evidence": None,
                "estimate": None,
            }
        ],
        "misses": [
            {
                "modules": ["b", "c"],
                "anchor": "softmax",
                "nearest": "softmax_matmul",
                "stopped_at": "scale",
                "reason": {"rule": "rule", "observed": "observed", "remedy": None},
                "source": "m.py:1",
            }
        ],
        "seconds": [{"pass": "match", "seconds": 0.5}, {"pass": "lower", "seconds": 0.25}],
        "kernels": [{"kernel": "attention_forward", "seconds": 1.5}],
        "failure": None,
        "faults": [],
        "from_cache": False,
        "not_kept": None,
        "unpad": None,
        "dumped": None,
    }


def test_the_spec_can_be_built_again_from_the_json() -> None:
    spec = json.loads(make_report().to_json())["sites"][0]["spec"]
    assert AttentionSpec.from_text(json.dumps(spec)) == SPEC


@pytest.mark.parametrize(
    ("mask", "formula", "unproved"),
    [
        (masks.MaskSpec(kinds=(masks.Causal(),)), "k <= q", None),
        (masks.MaskSpec(reason="m holds an element for each pair"), None, "m holds an element for each pair"),
    ],
)
def test_what_a_mask_was_proved_to_be_or_why_not(
    mask: masks.MaskSpec, formula: str | None, unproved: str | None
) -> None:
    site = dataclasses.replace(make_report().sites[0], spec=dataclasses.replace(SPEC, mask=mask))
    [row] = dataclasses.replace(make_report(), sites=(site,)).to_dict()["sites"]
    assert (row["mask_formula"], row["mask_unproved"]) == (formula, unproved)


def test_an_empty_report_has_every_key_too() -> None:
    assert Report(graph="0/0", target="cpu").to_dict().keys() == make_report().to_dict().keys()


def test_reports_merge() -> None:
    merged = Reports((make_report("0/0"), Report(graph="1/0", target="cpu"), make_report("2/0")))
    data = json.loads(merged.to_json())
    assert {key: data[key] for key in ("version", "num_graphs", "num_sites", "num_misses")} == {
        "version": 1,
        "num_graphs": 3,
        "num_sites": 6,
        "num_misses": 4,
    }
    assert data["graphs"] == [one.to_dict() for one in merged]
    assert (merged.num_sites, merged.num_misses) == (6, 4)
    assert repr(merged) == (
        "<Reports: 3 graphs, 6 attention sites (sdpa 6), 4 misses, 1.50 s in passes; print() shows the table>"
    )
