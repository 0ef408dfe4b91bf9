"""The words of a decision, which reports and tests compare and print."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Copy, Decision, Reason, Refusal

REASON = Reason(code=Code.HEAD_DIM, rule="head_dim is at most 256", observed="512", remedy="split the heads")


def test_a_reason_reads_as_one_line() -> None:
    assert str(REASON) == "head_dim is at most 256; observed 512; split the heads (AC208)"
    assert str(dataclasses.replace(REASON, remedy=None)) == "head_dim is at most 256; observed 512 (AC208)"


@pytest.mark.parametrize(
    "value",
    [
        REASON,
        Refusal(lowering="fa4", reasons=(REASON,)),
        Decision(lowering="untouched", refusals=(Refusal(lowering="fa4", reasons=(REASON,)),)),
        Copy(operand="q", bytes=None, why="strides"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_they_are_values(value: Reason | Refusal | Decision | Copy) -> None:
    """Equal ones are one key, nothing changes them, and they hold what they were given by name."""
    assert hash(value) == hash(dataclasses.replace(value))
    assert value == dataclasses.replace(value)
    first = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, first, "other")
    with pytest.raises(TypeError):
        type(value)(*(getattr(value, field.name) for field in dataclasses.fields(value)))


def test_nothing_is_refused_by_default() -> None:
    assert Decision(lowering="math").refusals == ()
    assert REASON.remedy is not None
    assert Reason(code=Code.DTYPE, rule="a", observed="b").remedy is None


def test_they_come_without_torch() -> None:
    code = "import sys; import attn_compiler.reasons.decisions; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
