"""A pass over keys for one of the two gradients; what they are is test_triton_launch.py's."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attn_compiler.lowerings.shared.parts.kernel_plan import Call
from tests.lowerings.kernel_cases import BY_NAME
from tests.lowerings.kernel_problems import Problem, build, results


def apart(problem: Problem) -> Problem:
    call = Call.from_text(problem.text)
    grad_kv = dataclasses.replace(call.tiles.grad_kv, apart=True)
    text = dataclasses.replace(call, tiles=dataclasses.replace(call.tiles, grad_kv=grad_kv)).to_text()
    return dataclasses.replace(problem, text=text)


@pytest.mark.parametrize("name", ["gqa", "keys_holes", "dropout", "bias_hqk_causal", "softcap"])
def test_each_gradient_alone_is_what_both_are_together(name: str) -> None:
    problem = build(BY_NAME[name])
    together, alone = results(problem), results(apart(problem))
    labels = problem.labels
    for label, one, other in zip(labels, together, alone, strict=True):
        assert torch.equal(one, other), label
