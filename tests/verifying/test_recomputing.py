"""The model's own operations at a site: which they are, and that they give the same again."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from attn_compiler.verifying import outputs, whole
from attn_compiler.verifying.interpreting import Noise
from attn_compiler.verifying.values import Key, Values
from attn_compiler.verifying.whole import Called
from tests.verifying.planning import Planned, Tensor, planned, qkv


def test_dependents_run_from_the_product_to_the_output() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q.sin() @ k.mT * 0.3
        scores = scores - scores.amax(-1, keepdim=True)
        return (scores.softmax(-1) @ v.cos()).exp()

    check = planned(function, *qkv()).check("output")
    names = [str(n.target).split(".")[1] for n in outputs.dependents(check.body.mirror, check.site.match)]
    assert names == ["matmul", "mul", "amax", "sub", "softmax", "matmul"]


def _function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3
    scores.masked_fill_(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ v


def _values(found: Planned) -> Values:
    """All that the model's own graph computes."""
    (body,) = found.plan.bodies.values()
    values = Values(bodies=found.plan.mirrors)

    def record(node: fx.Node, value: Any) -> Any:
        values.recorded[Key(body.index, node.name)] = value
        return value

    whole.run_model(Called.copied(found.plan, found.args), record=record)
    return values


def test_the_same_again_wider_and_with_noise() -> None:
    inputs = qkv()
    found = planned(_function, *inputs)
    check = found.check("output")
    values = _values(found)
    again = outputs.recomputed(check, values)
    assert torch.equal(again, _function(*inputs))
    wide = outputs.recomputed(check, values, dtype=torch.float64)
    torch.testing.assert_close(wide, _function(*(x.double() for x in inputs)), rtol=1e-12, atol=1e-12)
    noisy = outputs.recomputed(check, values, dtype=torch.float64, noise=Noise(seed=0))
    assert 0 < float((noisy - wide).abs().max()) < 1e-3
