"""What Dynamo leaves to Python is published once, for what is compiled by this backend alone, and costs no call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import attn_compiler
from attn_compiler.passes.matching import left_to_python as matching
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.errors import AttnCompilerWarning


@torch.compiler.disable
def attention(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def model(x: torch.Tensor) -> torch.Tensor:
    return attention(x)


X = torch.randn(1, 2, 4, 8)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    attn_compiler.reset()


def _codes() -> list[str]:
    return [str(miss.reason.code) for report in attn_compiler.reports() for miss in report.misses]


def _compiled(backend: str = "attn_compiler", **options: Any) -> Any:
    given = {"options": {"inner": "eager", **options}} if backend == "attn_compiler" else {}
    return torch.compile(model, backend=backend, **given)


def _watched() -> None:
    """A first graph: a reset of Dynamo's ends the watch, which begins with the next."""
    torch.compile(lambda x: x + 1, backend="attn_compiler", options={"inner": "eager"})(X)
    attn_compiler.reset()


def test_a_frame_without_a_graph_has_a_report() -> None:
    _watched()
    torch.testing.assert_close(_compiled()(X), model(X))
    assert _codes() == [Code.LEFT_TO_PYTHON]
    (report,) = attn_compiler.reports()
    assert report.target == "Python, no graph"
    assert "torch.compiler.disable" in str(report)


def test_what_another_backend_compiles_is_not_told() -> None:
    _watched()
    _compiled("eager")(X)
    assert _codes() == []


def test_a_second_graph_does_not_tell_again() -> None:
    _watched()
    compiled = _compiled()
    for _ in range(2):
        compiled(X)
    torch.compile(lambda x: x * 2, backend="attn_compiler", options={"inner": "eager"})(X)
    assert _codes() == [Code.LEFT_TO_PYTHON]


def test_a_fault_costs_the_report_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _watched()

    def broken(_: object) -> None:
        raise RuntimeError("left_to_python is broken")

    monkeypatch.setattr(matching, "find", broken)
    with pytest.warns(AttnCompilerWarning, match="left_to_python is broken"):
        torch.testing.assert_close(_compiled()(X), model(X))
    assert _codes() == []
