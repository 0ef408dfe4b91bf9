"""What holds of any tuple of steps."""

from __future__ import annotations

from typing import Any

import pytest

from attn_compiler.passes.pipeline.step import PipelineStep, check_contracts


def _nothing(*_: Any) -> None: ...


def _step(name: str, **further: Any) -> PipelineStep:
    return PipelineStep(name=name, run=_nothing, **further)


def test_steps_after_what_they_need_pass() -> None:
    check_contracts((_step("a"), _step("b", needs=("a",), leads=("a",)), _step("c", needs=("a", "b"))))


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ((_step("a", needs=("b",)), _step("b")), r"the pass 'a' needs \['b'\], which nothing before it gives"),
        ((_step("a"), _step("a")), "two passes are called 'a'"),
        ((_step("a", leads=("b",)),), r"the pass 'a' leads to \['b'\], which is no pass"),
    ],
    ids=["too early", "twice", "nowhere"],
)
def test_others_are_refused(steps: tuple[PipelineStep, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_contracts(steps)
