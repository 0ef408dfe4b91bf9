"""After a collective, a send or a receive a mask means what it holds. PyTorch counts none of these as a write."""

from __future__ import annotations

import pytest

from tests.distributed import processes, written_masks
from tests.distributed.written_masks import WHOLE, WRITES, Outcome


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Outcome]]:
    return processes.run(written_masks.outcomes)


@pytest.fixture(scope="module")
def in_one_function() -> list[dict[str, float]]:
    return processes.run(written_masks.in_one_function)


@pytest.mark.parametrize("name", WRITES)
def test_a_mask_that_was_written_means_what_it_holds(outcomes: list[dict[str, Outcome]], name: str) -> None:
    found = [outcome[name] for outcome in outcomes]
    assert any(one.is_changed for one in found)
    for one in found:
        assert one.was_known
        assert one.off < 1e-5
        assert not (one.is_changed and one.is_known)


@pytest.mark.parametrize("name", WHOLE)
def test_in_compiled_code_too(in_one_function: list[dict[str, float]], name: str) -> None:
    assert all(off[name] < 1e-5 for off in in_one_function)
