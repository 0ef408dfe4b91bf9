"""A step of decoding writes the new state over the old one, where the model does, and nowhere else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.graph_ops.linear_recurrence import definition
from attn_compiler.lowerings.linear import triton_op, triton_step
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
    """As a cache does: the new state takes the place of the old one."""
    return _of_cache(form.text)(given, state)


def _of_cache(text: str) -> Callable[[list[Tensor], Tensor], Tensor]:
    def step(given: list[Tensor], state: Tensor) -> Tensor:
        out, last = torch.ops.attn_compiler.linear_triton([*given[:-1], state], text)
        state.copy_(last)
        return out

    return step


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


class _Seen:
    """What the op was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states: list[int] = []
        own = triton_step.one_token

        def told(*given: Any) -> Tensor:
            self.states.append(given[6].data_ptr())
            return own(*given)

        monkeypatch.setattr(triton_step, "one_token", told)
        # The op keeps the function that it found first.
        monkeypatch.setattr(
            Late, "found", property(lambda late: getattr(__import__(late.module, fromlist=["_"]), late.function))
        )


@pytest.mark.parametrize("name", list(_FORMS))
def test_a_cache_is_written_without_a_copy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, form = _Seen(monkeypatch), _FORMS[name]
    given = _given(form, (1, 2, 4, 16, 16))
    state = given[-1].clone()
    expected = state.clone()
    with torch.no_grad():
        out = torch.compile(_of_cache(form.text), fullgraph=True)(given, state)
        wanted = _step(form, given, expected)
    assert seen.states[0] == state.data_ptr()
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(state, expected)


def test_a_state_that_is_read_afterwards_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, form, text = _Seen(monkeypatch), FORMS["delta"], FORMS["delta"].text
    given = _given(form, (1, 2, 4, 16, 16))
    state = given[-1]
    before = state.clone()

    def both(given: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        out, last = torch.ops.attn_compiler.linear_triton(given, text)
        return out, last, state * 2

    with torch.no_grad():
        found, wanted = torch.compile(both, fullgraph=True)(given), both(given)
    assert state.data_ptr() not in seen.states
    torch.testing.assert_close(state, before, rtol=0, atol=0)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", list(_FORMS))
def test_a_step_with_gradients_is_the_recurrence(name: str) -> None:
    form = _FORMS[name]
    given = problem(form, (1, 2, 4, 16, 16))
    out, last = triton_op.run(given, form.text)
    grads = torch.autograd.grad([out.sum(), last.sum()], given)
    exact = [x.detach().double().requires_grad_() for x in given]
    wanted, state = definition(_exact(form), exact)
    expected = torch.autograd.grad([wanted.sum(), state.sum()], exact)
    for found, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(found.double(), other, rtol=1e-3, atol=1e-4)


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
