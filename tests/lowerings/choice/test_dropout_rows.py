"""Dropout beside a mask: the orders are those of what was measured."""

from __future__ import annotations

import csv
import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from attn_compiler.lowerings.choice import evidence, priorities
from attn_compiler.options.options import Options
from attn_compiler.passes.writing.select import decide
from attn_compiler.spec.target import Target
from benchmarks import select_cases
from tests.lowerings.specs import dense, make_spec

MEASURED = Path(__file__).parents[3] / "benchmarks" / "results" / "select_dropout.csv"
#: within which orders are not told apart: a row stands for other sizes, too
NEAR = 1.3


def _times() -> dict[str, dict[str, float]]:
    """Of each case, microseconds of forward and backward by side."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    with MEASURED.open() as file:
        for line in csv.DictReader(file):
            found[line["case"]][line["side"]] += float(line["p50_us"])
    return found


@pytest.mark.parametrize("name", sorted(_times()))
@pytest.mark.parametrize("dropout_p", [0.1, 0.125])
def test_the_choice_is_near_the_fastest_that_takes_the_case(name: str, dropout_p: float) -> None:
    case = next(case for case in select_cases.DROPOUT_CASES if case.name == name)
    spec = select_cases.spec_of(case, training=True)
    spec = dataclasses.replace(spec, score=dataclasses.replace(spec.score, dropout_p=dropout_p))
    times = _times()[name]
    # PyTorch's own choice was cuDNN, which takes multiples of 1/16.
    sides = {"triton": times["triton"], "sdpa_efficient": times["sdpa_efficient"]}
    if dropout_p == 0.125 and "table" not in name:
        sides["sdpa_cudnn"] = times["sdpa"]
    chosen = decide(spec, Target.fake(), Options()).lowering
    assert sides[chosen] <= NEAR * min(sides.values())
    found = evidence.evidence(spec, Target.fake())
    assert found is not None
    assert found.measured


def test_every_row_says_where_it_was_measured() -> None:
    assert all(row.measured and "select_dropout.csv" in row.why for row in priorities.group("dropout"))


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_few_scores_and_no_mask_are_left_to_pytorch(head_dim: int, needs_grad: bool) -> None:
    """BERT, XLM-R and T5 as they are configured: cuDNN takes no dropout of 0.1."""
    target = Target.fake()
    sizes: dict[str, Any] = {"seqlen_q": 512, "seqlen_kv": 512, "head_dim": head_dim, "needs_grad": needs_grad}
    assert decide(make_spec(mask=dense(2, 1, 1, 512), dropout_p=0.1, **sizes), target, Options()).lowering == "triton"
    few = make_spec(mask=dense(2, 1, 1, 128), dropout_p=0.1)
    assert decide(few, target, Options()).lowering == "sdpa_efficient"
    assert decide(make_spec(dropout_p=0.1, **sizes), target, Options()).lowering.startswith("sdpa_")
