"""Decisions change on purpose only."""

from __future__ import annotations

import io

from tests.gate import golden, table
from tests.lowerings import golden_decisions


def test_decisions_are_those_of_the_table() -> None:
    file = io.StringIO()
    golden_decisions.write(file)
    said = table.differences(golden_decisions.read(), golden_decisions.parsed(file.getvalue()))
    assert not said, table.failure(said, golden.COMMAND)
    assert file.getvalue() == golden_decisions.PATH.read_text()


def test_every_optional_kernel_is_decided_on() -> None:
    """A machine with a version that is not taken would say nothing of the family."""
    decided = golden_decisions.read()
    for machine, lowering in (("sm90_fa4", "fa4"), ("sm90_cudnn_frontend", "cudnn")):
        assert any(key[2] == machine and value.split()[0] == lowering for key, value in decided.items()), machine
