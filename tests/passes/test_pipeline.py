"""The pipeline's contracts: what each pass needs, and what those before it give."""

from __future__ import annotations

import pytest

from attn_compiler.passes.pipeline import PIPELINE, check_contracts


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
    with pytest.raises(ValueError, match="decisions"):
        check_contracts(without)
