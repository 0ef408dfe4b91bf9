"""That a family's outcome is told apart: right, wrong, or left out. The families themselves need a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.lowerings import sanitized


def test_an_outcome_is_right_or_wrong_or_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def left_out() -> None:
        raise sanitized.LeftOutError("no such library")

    def wrong() -> None:
        raise AssertionError("off by 1")

    assert sanitized.outcome(lambda: None) == (True, "ok")
    assert sanitized.outcome(left_out) == (True, "left out: no such library")
    is_right, words = sanitized.outcome(wrong)
    assert not is_right
    assert words.startswith("WRONG")
    assert "off by 1" in words


@pytest.mark.gpu
@pytest.mark.parametrize("family", sanitized.FAMILIES)
def test_a_family_on_a_gpu(family: str) -> None:
    is_right, words = sanitized.outcome(sanitized.FAMILIES[family])
    assert is_right, words
