"""A call's tensors by name, and calls that differ from it in some of them."""

from __future__ import annotations

import torch

from attn_compiler.lowerings.linear.triton_tensors import LinearTensors
from tests.lowerings.linear.triton_problems import FORMS, problem


def _call(name: str = "delta") -> LinearTensors:
    form = FORMS[name]
    given = dict(zip(form.roles, [x.detach() for x in problem(form, (70, 2, 4, 16, 24))], strict=True))
    operands = {key: given[key] for key in ("q", "k", "v", "g", "beta")}
    return LinearTensors.of("linear_chunks", {**operands, "skip": None, "first": given["state"]}, form.text)


def test_absent_tensors_have_no_name() -> None:
    assert set(_call().named) == {"q", "k", "v", "g", "beta", "first"}


def test_numbers_say_that_a_sequence_is_one_piece() -> None:
    numbers = _call().numbers
    assert (numbers["pieces"], numbers["of_piece"], numbers["WIDE"]) == (1, 2, 32)
    assert (numbers["OF_OUT"], numbers["DELTA"], numbers["scale"]) == (0, True, 0.25)


def test_a_call_with_other_tensors_leaves_the_first_as_it_is() -> None:
    call, other = _call(), torch.zeros(1)
    assert call.having(first=other).named["first"] is other
    assert "first" not in call.without("first", "never").named
    assert call.named["first"] is not other
