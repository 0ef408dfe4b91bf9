"""What Dynamo traces for a call: one node for our backend, all of the function for every other one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import attn_compiler
from attn_compiler.lowerings.linear import chunks, reference
from attn_compiler.passes.matching.linear import proving, substitutes
from attn_compiler.reasons.codes import Code
from tests.near_miss import linear_variants
from tests.passes.matching.linear import linear_functions

_OPTIONS = {"inner": "eager", "strict": True, "lowering": "linear_reference"}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    attn_compiler.reset()


def _given(length: int = 70) -> dict[str, Tensor]:
    torch.manual_seed(0)
    tokens = (2, length)
    return {
        "query": torch.randn(*tokens, 2, 8),
        "key": torch.randn(*tokens, 2, 8),
        "value": torch.randn(*tokens, 4, 6),
        "g": -torch.rand(*tokens, 4),
        "beta": torch.rand(*tokens, 4),
    }


def _called(function: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    def run(**given: Tensor) -> Any:
        return function(**given, output_final_state=True, use_qk_l2norm_in_kernel=True, **more)

    return run


_CHUNK = linear_variants.own("torch_chunk_gated_delta_rule")


def test_a_call_becomes_one_lowering() -> None:
    run = torch.compile(_called(_CHUNK), backend="attn_compiler", options=_OPTIONS, fullgraph=True)
    torch.testing.assert_close(run(**_given()), _called(_CHUNK)(**_given()), rtol=1e-4, atol=1e-5)
    (report,) = attn_compiler.reports()
    (row,) = report.linear
    assert (row.decision.lowering, row.spec.length, report.num_misses) == ("linear_reference", 70, 0)
    assert "torch_chunk_gated_delta_rule" in row.function


def test_another_backend_gets_the_graph_that_it_ever_got() -> None:
    graphs: list[list[str]] = []

    def other(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graphs.append([f"{node.op} {node.target} {node.args} {node.kwargs}" for node in gm.graph.nodes])
        return gm.forward

    copy = _copied(_CHUNK)
    torch.compile(_called(copy), backend=other, fullgraph=True)(**_given())
    substitutes.propose(_CHUNK)
    torch._dynamo.reset()
    torch.compile(_called(_CHUNK), backend=other, fullgraph=True)(**_given())
    never, now = graphs
    assert never == now
    assert not any("attn_compiler" in line for line in now)


def _copied(function: Any) -> Callable[..., Any]:
    made = type(function)(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made  # type: ignore[no-any-return]


def test_a_function_of_a_users_module_is_taken_too() -> None:
    function = linear_functions.by_token
    run = torch.compile(
        lambda **x: function(**x, output_final_state=True), backend="attn_compiler", options=_OPTIONS, fullgraph=True
    )
    given = _given(5) | {"value": torch.randn(2, 5, 2, 6), "g": -torch.rand(2, 5, 2), "beta": torch.rand(2, 5, 2)}
    wanted = function(**given, output_final_state=True)
    torch.testing.assert_close(run(**given), wanted, rtol=1e-4, atol=1e-5)
    (report,) = attn_compiler.reports()
    assert report.misses == ()
    assert [one.function for one in report.linear] == [f"{linear_functions.__name__}:by_token"]
    assert report.linear[0].spec.form.eps is None


def test_a_call_that_is_not_taken_runs_and_says_why() -> None:
    by_token = linear_variants.own("torch_recurrent_gated_delta_rule")
    given = {name: x.long() if name == "beta" else x for name, x in _given(3).items()}
    run = torch.compile(_called(by_token), backend="attn_compiler", options=_OPTIONS)
    torch.testing.assert_close(run(**given), _called(by_token)(**given))
    (report,) = attn_compiler.reports()
    (miss,) = report.misses
    assert (miss.anchor, miss.reason.code, report.linear) == ("torch_recurrent_gated_delta_rule", Code.DTYPE, ())


def test_an_argument_that_nobody_knows_leaves_the_call_alone() -> None:
    def run(**given: Tensor) -> Any:
        return _CHUNK(**given, output_final_state=True, use_qk_l2norm_in_kernel=True, more=given["g"])

    compiled = torch.compile(run, backend="attn_compiler", options=_OPTIONS, fullgraph=True)
    torch.testing.assert_close(compiled(**_given()), run(**_given()))
    (report,) = attn_compiler.reports()
    assert (report.num_linear, report.num_misses) == (0, 1)


def test_one_graph_serves_every_length() -> None:
    run = torch.compile(_called(_CHUNK), backend="attn_compiler", options=_OPTIONS, fullgraph=True)
    for length in (70, 100, 333):
        given = _given(length)
        for x in given.values():
            torch._dynamo.mark_dynamic(x, 1)
        torch.testing.assert_close(run(**given), _called(_CHUNK)(**given), rtol=1e-4, atol=1e-5)
    (report,) = attn_compiler.reports()
    assert isinstance(report.linear[0].spec.length, str)


def test_explain_tells_of_the_call() -> None:
    (report,) = attn_compiler.explain(_called(_CHUNK), **_given())
    assert report.num_linear + report.num_misses == 1


def test_all_is_as_it_was_after_dynamo_forgot_everything() -> None:
    torch._dynamo.reset()
    torch._dynamo.reset()
    run = torch.compile(_called(_CHUNK), backend="attn_compiler", options=_OPTIONS, fullgraph=True)
    run(**_given())
    assert attn_compiler.reports().num_linear == 1


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_verify_holds_a_lowering_against_the_function(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Also in a graph that has no attention besides."""
    by_token = linear_variants.own("torch_recurrent_gated_delta_rule")
    given = {name: x.requires_grad_() for name, x in _given(6).items()}
    real = chunks.by_chunks
    monkeypatch.setattr(reference, "by_chunks", lambda *given: tuple(x * factor for x in real(*given)))
    options = {**_OPTIONS, "verify": True, "cache_rewrites": False}
    run = torch.compile(_called(by_token), backend="attn_compiler", options=options, fullgraph=True)
    if factor > 1:
        monkeypatch.setattr(proving, "why_not", lambda *_: None)
        with pytest.raises(attn_compiler.VerificationMismatch):
            run(**given)
        return
    out, last = run(**given)
    (out.sum() + last.sum()).backward()
    assert {one.subject for one in attn_compiler.verifications()} == {"graph outputs", "graph gradients"}
