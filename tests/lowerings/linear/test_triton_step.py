"""A step of decoding is the recurrence, and writes the new state over the old one."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.graph_ops.linear_recurrence import definition
from attn_compiler.lowerings.linear import triton_step
from attn_compiler.spec.linear import LinearForm
from attn_compiler.torch_private.op_library import Late
from tests.lowerings.linear.triton_problems import FORMS, problem

#: all begin with a state
_FORMS = {
    name: form if "state" in form.roles else dataclasses.replace(form, roles=(*form.roles, "state"))
    for name, form in FORMS.items()
}
_SIZES = [(1, 2, 4, 24, 40), (1, 1, 2, 16, 16)]


def _given(form: LinearForm, sizes: tuple[int, ...], device: str = "cpu") -> list[Tensor]:
    return [x.detach() for x in problem(form, sizes, device=device)]  # type: ignore[arg-type]


def _exact(form: LinearForm) -> LinearForm:
    return dataclasses.replace(form, out_dtype="float64", state_dtype="float64")


def _step(form: LinearForm, given: list[Tensor], state: Tensor) -> Tensor:
    """The result of a token, whose state takes the place of the old one."""
    return torch.ops.attn_compiler.linear_triton_step(given[:-1], state, form.text)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", list(_FORMS))
@pytest.mark.parametrize("sizes", _SIZES, ids=str)
def test_steps_are_the_recurrence(name: str, sizes: tuple[int, ...]) -> None:
    form = _FORMS[name]
    state = _given(form, sizes)[-1].clone()
    expected = state.double()
    for _ in range(3):
        given = _given(form, sizes)
        exact = [x.double() for x in given]
        exact[-1] = expected
        wanted, expected = definition(_exact(form), exact)
        torch.testing.assert_close(_step(form, given, state), wanted.float(), rtol=1e-4, atol=1e-5, check_dtype=False)
        torch.testing.assert_close(state, expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", list(_FORMS))
def test_compiled_it_writes_without_a_copy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    own = triton_step.one_token

    def told(*given: Any) -> Tensor:
        written.append(given[6].data_ptr())
        return own(*given)

    monkeypatch.setattr(triton_step, "one_token", told)
    # An op keeps the function that it found first.
    monkeypatch.setattr(Late, "found", property(lambda late: getattr(sys.modules[late.module], late.function)))
    form, text = _FORMS[name], _FORMS[name].text
    given = _given(form, (1, 2, 4, 16, 16))
    state = given[-1].clone()
    expected = state.clone()
    step = torch.ops.attn_compiler.linear_triton_step
    with torch.no_grad():
        out = torch.compile(lambda given, state: step(given, state, text), fullgraph=True)(given[:-1], state)
        wanted = _step(form, given, expected)
    assert written == [state.data_ptr(), expected.data_ptr()]
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(state, expected)


def test_an_operand_of_the_states_memory_is_read_before_it_is_written() -> None:
    form = _FORMS["delta"]
    given = _given(form, (1, 2, 2, 16, 16))
    state = given[-1].clone()
    apart, kept = state[:, None, :, 3].clone(), state.clone()
    wanted = _step(form, [*given[:2], apart, *given[3:]], kept)
    torch.testing.assert_close(_step(form, [*given[:2], state[:, None, :, 3], *given[3:]], state), wanted)
    torch.testing.assert_close(state, kept)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(_FORMS))
def test_on_a_gpu_further_steps_are_replayed(name: str) -> None:
    """Ten steps, of which all but the first are replayed, are the recurrence; so they are in a CUDA graph."""
    form, sizes = _FORMS[name], (1, 2, 4, 64, 64)
    state = _given(form, sizes, "cuda")[-1].clone()
    expected = state.double()
    for _ in range(10):
        given = _given(form, sizes, "cuda")
        exact = [x.double() for x in given]
        exact[-1] = expected
        wanted, expected = definition(_exact(form), exact)
        torch.testing.assert_close(_step(form, given, state), wanted.float(), rtol=1e-4, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(state, expected.float(), rtol=1e-4, atol=1e-5)
    graph, before = torch.cuda.CUDAGraph(), state.clone()
    with torch.cuda.graph(graph):
        _step(form, given, state)
    state.copy_(before)
    graph.replay()
    _step(form, given, before)
    torch.testing.assert_close(state, before, rtol=0, atol=0)
