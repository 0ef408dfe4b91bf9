"""The pipeline keeps its contracts, and names everything that is done to a graph."""

from __future__ import annotations

import pytest

from attn_compiler.passes.pipeline.step import check_contracts
from attn_compiler.passes.pipeline.steps import PIPELINE


def test_pipeline_keeps_its_contracts() -> None:
    check_contracts(PIPELINE)


@pytest.mark.parametrize("position", range(1, len(PIPELINE)))
def test_a_pass_that_comes_too_early_is_refused(position: int) -> None:
    """Every neighbour exchange breaks a contract: no two passes may be swapped unnoticed."""
    swapped = list(PIPELINE)
    swapped[position - 1], swapped[position] = swapped[position], swapped[position - 1]
    with pytest.raises(ValueError, match=rf"the pass '{PIPELINE[position].name}' needs"):
        check_contracts(tuple(swapped))


def test_a_pass_that_is_missing_is_named_by_what_it_gives() -> None:
    without = tuple(step for step in PIPELINE if step.name != "select")
    with pytest.raises(ValueError, match="select"):
        check_contracts(without)


def test_steps_on_units_stand_in_one_row() -> None:
    on = [step.on for step in PIPELINE]
    first, last = on.index("unit"), len(on) - on[::-1].index("unit")
    assert set(on[first:last]) == {"unit"}


def test_options_that_rewrite_a_graph_go_on_from_its_mirror() -> None:
    assert {step.name for step in PIPELINE if "mirror" in step.leads} == {"context_parallel", "unpad"}
