"""`linear_call` runs the model's own function, eagerly and under autograd, and gives its calls back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor, fx

from attn_compiler.lowerings.graph_ops import linear_call
from attn_compiler.lowerings.graph_ops.linear_recurrence import definition
from tests.lowerings.linear import linear_forms, linear_problems


@pytest.fixture(autouse=True)
def _functions(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {form.function: definition for form, _ in linear_forms.problems(length=1)}
    monkeypatch.setattr(linear_call, "FUNCTIONS", known)


def test_it_gives_what_the_function_gives_with_all_gradients() -> None:
    for form, given in linear_forms.problems(length=6):
        wanted = [x.requires_grad_() for x in given]

        def of(op: object, operands: Sequence[Tensor] = wanted, text: str = form.text) -> Sequence[Tensor]:
            outs: Sequence[Tensor] = op(list(operands), text)  # type: ignore[operator]
            return outs

        far = linear_problems.furthest(
            lambda of=of: of(linear_call.linear_call),  # type: ignore[misc]
            lambda of=of: of(linear_call.linear_own),  # type: ignore[misc]
            wanted,
        )
        assert max(far) < 1e-5


def test_its_fake_has_the_shapes_and_the_dtypes() -> None:
    for form, given in linear_forms.problems(length=6):
        real, made = linear_call.linear_call(given, form.text), linear_call.fake(given, form.text)
        for x, y in zip(real, made, strict=True):
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


def test_calls_are_given_back_in_place() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_function(linear_call.linear_call, ([x], linear_forms.DELTA.text))
    graph.output(call)
    assert linear_call.calls(graph) == [call]
    linear_call.give_back(graph)
    assert linear_call.calls(graph) == []
    assert call.target is linear_call.linear_own


def test_a_function_that_no_model_has_is_named() -> None:
    with pytest.raises(KeyError, match="nowhere:f"):
        linear_call.own([], '{"kind":"LinearForm","function":"nowhere:f","recurrence":"delta","roles":[]}')
