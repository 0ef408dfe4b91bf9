from __future__ import annotations

import math

import pytest
import torch

from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.verifying import recomputing, running
from tests.verifying.planning import SHAPE, Planned, Tensor, causal, masked, planned, qkv


def _with_factor(found: Planned, factor: float) -> Planned:
    """The same plan, with a kernel whose result is too large by a factor."""
    check = found.check("output")
    assert check.new_out is not None
    graph = check.new_out.graph
    with graph.inserting_after(check.new_out):
        check.new_out = graph.call_function(torch.mul, (check.new_out, factor))
    check.body.outs[check.new_out.name] = check.body.outs[str(check.new_out.args[0])]
    del check.body.outs[str(check.new_out.args[0])]
    return found


# Off by a part of 1 of the result: what has to be allowed, and what has to be noticed.
@pytest.mark.parametrize(
    ("dtype", "little", "much"),
    [(torch.float32, 1e-7, 1e-5), (torch.bfloat16, 2e-3, 5e-2), (torch.float16, 2e-4, 5e-3)],
    ids=lambda x: str(x)[6:] if isinstance(x, torch.dtype) else None,
)
def test_the_rule_is_neither_too_strict_nor_too_lax(dtype: torch.dtype, little: float, much: float) -> None:
    found = _with_factor(planned(causal, *qkv(dtype=dtype)), 1 + little)
    assert running.run_checks(found.plan, found.args).found[-1].skipped is None
    found = _with_factor(planned(causal, *qkv(dtype=dtype)), 1 + much)
    with pytest.raises(VerificationMismatch, match="output of sdpa_cpu_flash"):
        running.run_checks(found.plan, found.args)


def test_errors_of_small_results_count() -> None:
    """The rounding that is allowed is that of the values, not an absolute number."""
    q, k, v = qkv()
    found = _with_factor(planned(causal, q, k, v * 1e-6), 1 + 1e-3)
    with pytest.raises(VerificationMismatch):
        running.run_checks(found.plan, found.args)


def test_another_dtype_is_a_mismatch() -> None:
    found = planned(causal, *qkv())
    check = found.check("output")
    assert check.new_out is not None
    graph = check.new_out.graph
    old = check.new_out
    with graph.inserting_after(old):
        check.new_out = graph.call_function(torch.Tensor.double, (old,))
    check.body.outs[check.new_out.name] = check.body.outs.pop(old.name)
    with pytest.raises(VerificationMismatch, match=r"torch\.float64 .*differ"):
        running.run_checks(found.plan, found.args)


def test_a_site_of_the_model_that_wrote_its_scores_in_place() -> None:
    """The exact result is made from copies, so that the model's own values stay what they are."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        scores *= 0.3
        scores.masked_fill_(torch.ones(6, 6).triu(1).bool(), -torch.inf)
        return scores.softmax(-1) @ v + q

    found = planned(function, *qkv())
    output = running.run_checks(found.plan, found.args).found[-1]
    assert output.skipped is None
    assert output.elements == math.prod(SHAPE)


def test_exact_results_are_closer_than_the_models_own() -> None:
    found = planned(masked, *qkv(dtype=torch.float32), torch.ones(2, 6, dtype=torch.int64))
    output = running.run_checks(found.plan, found.args).found[-1]
    assert output.error is not None
    assert 0 < output.error < 1e-6


def test_where_the_model_itself_overflows_there_is_nothing_to_compare() -> None:
    q, k, v = qkv(dtype=torch.float16)
    v[0, 0, 0, 0] = torch.inf
    found = planned(causal, q, k, v)
    output = running.run_checks(found.plan, found.args).found[-1]
    assert output.skipped is None


def test_not_enough_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    found = planned(causal, *qkv())
    monkeypatch.setattr(recomputing, "output", full)
    output = running.run_checks(found.plan, found.args).found[-1]
    assert output.skipped == "there is not enough memory for the exact result"
