"""Outputs of a site beside the model's own operations, which run once more: the same again, wider and with noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.verifying import outputs, whole
from attn_compiler.verifying.interpreting import Noise
from attn_compiler.verifying.values import Key, Values
from attn_compiler.verifying.whole import Called
from tests.verifying.planning import LENGTH, SHAPE, Planned, Tensor, causal, masked, planned, qkv


def _changed(found: Planned, function: Callable[..., Any], *more: Any) -> Planned:
    """The same plan, with a kernel whose result is changed."""
    check = found.check("output")
    old = check.new_out
    with old.graph.inserting_after(old):
        check.new_out = old.graph.call_function(function, (old, *more))
    check.body.outs[check.new_out.name] = check.body.outs.pop(old.name)
    return found


# Off by a part of 1 of the result: what has to be allowed, and what has to be noticed.
@pytest.mark.parametrize(
    ("dtype", "little", "much", "size"),
    [
        (torch.float32, 1e-7, 1e-5, 1.0),
        (torch.float32, 1e-7, 1e-5, 1e-6),
        (torch.bfloat16, 2e-3, 5e-2, 1.0),
        (torch.float16, 2e-4, 5e-3, 1.0),
    ],
    ids=lambda x: str(x)[6:] if isinstance(x, torch.dtype) else None,
)
def test_the_rule_is_neither_too_strict_nor_too_lax(
    dtype: torch.dtype, little: float, much: float, size: float
) -> None:
    """The rounding that is allowed is that of the values, not an absolute number."""
    q, k, v = qkv(dtype=dtype)
    result = _changed(planned(causal, q, k, v * size), torch.mul, 1 + little).run("output")
    assert result.skipped is None
    assert result.error is not None
    assert 0 < result.error < much
    error = _changed(planned(causal, q, k, v * size), torch.mul, 1 + much).mismatch()
    assert error.what == "output of sdpa_cpu_flash"


def test_another_dtype_is_a_mismatch() -> None:
    with pytest.raises(VerificationMismatch, match=r"torch\.float64 .*differ"):
        _changed(planned(causal, *qkv()), torch.Tensor.double).found()


def _in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The exact result is made from copies, so that the model's own values stay what they are."""
    scores = q @ k.mT
    scores *= 0.3
    scores.masked_fill_(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ v + q


def test_right_outputs_hold() -> None:
    assert planned(_in_place, *qkv()).run("output").elements == math.prod(SHAPE)
    exact = planned(masked, *qkv(), torch.ones(2, LENGTH, dtype=torch.int64)).run("output")
    assert exact.error is not None
    assert 0 < exact.error < 1e-6
    q, k, v = qkv(dtype=torch.float16)
    # Where the model itself overflows there is nothing to compare.
    v[0, 0, 0, 0] = torch.inf
    assert planned(causal, q, k, v).run("output").skipped is None


def test_what_is_not_compared_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    check = planned(causal, *qkv(), lowerings=("untouched",)).check("output")
    assert check.skipped == "the site is as the model made it"
    assert check.is_as_it_was
    found = planned(causal, *qkv())
    monkeypatch.setattr(outputs, "recomputed", full)
    assert found.run("output").skipped == "there is not enough memory for the exact result"


def test_dependents_run_from_the_product_to_the_output() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q.sin() @ k.mT * 0.3
        scores = scores - scores.amax(-1, keepdim=True)
        return (scores.softmax(-1) @ v.cos()).exp()

    check = planned(function, *qkv()).check("output")
    names = [str(n.target).split(".")[1] for n in outputs.dependents(check.body.mirror, check.site.match)]
    assert names == ["matmul", "mul", "amax", "sub", "softmax", "matmul"]


def test_the_same_again_wider_and_with_noise() -> None:
    inputs = qkv()
    found = planned(lambda q, k, v: _in_place(q, k, v) - q, *inputs)
    check, (body,) = found.check("output"), found.plan.bodies.values()
    values = Values(bodies=found.plan.mirrors)

    def record(node: fx.Node, value: Any) -> Any:
        values.recorded[Key(body.index, node.name)] = value
        return value

    whole.run_model(Called.copied(found.plan, found.args), record=record)
    exact = _in_place(*(x.double() for x in inputs)) - inputs[0].double()
    torch.testing.assert_close(outputs.recomputed(check, values), exact.float())
    wide = outputs.recomputed(check, values, torch.float64)
    torch.testing.assert_close(wide, exact, rtol=1e-12, atol=1e-12)
    noisy = outputs.recomputed(check, values, torch.float64, Noise(seed=0))
    assert 0 < float((noisy - wide).abs().max()) < 1e-3
