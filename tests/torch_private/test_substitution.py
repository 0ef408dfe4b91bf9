"""What stands in the place of a function: what a decision is told, what is left alone, and running apart from a compilation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.autograd import forward_ad

from attn_compiler.torch_private import substitution
from attn_compiler.torch_private.substitution import Decided


def _function() -> Any:
    def added(x: Tensor, y: Tensor | None = None, times: int = 2, **others: Any) -> Tensor:
        return (x if y is None else x + y) * times

    return added


def _ours(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    return gm.forward


def _other(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    return gm.forward


substitution.take_for(_ours)


class _Decisions:
    def __init__(self, text: str = "taken") -> None:
        self.text = text
        self.told: list[tuple[dict[str, tuple[int, ...]], dict[str, Any]]] = []

    def __call__(self, tensors: Mapping[str, Tensor], others: Mapping[str, Any]) -> Decided:
        self.told.append(({name: tuple(x.shape) for name, x in tensors.items()}, dict(others)))
        return Decided(text=self.text)


def _taken(tensors: Mapping[str, Tensor], others: Mapping[str, Any], text: str) -> Tensor:
    return tensors["x"] * 0 + others["times"] + len(text)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def _run(decide: _Decisions, call: Callable[[Any], Callable[..., Any]], backend: Any = _ours) -> Any:
    function = _function()
    substitution.substitute(function, ("x", "y"), ("times",), decide, _taken)
    return torch.compile(call(function), backend=backend, fullgraph=True)


def test_a_decision_is_told_of_tensors_and_of_numbers() -> None:
    decide = _Decisions()
    run = _run(decide, lambda f: lambda x: f(x, y=x + 1, times=3))
    torch.testing.assert_close(run(torch.ones(2, 3)), torch.full((2, 3), 3.0 + len("taken")))
    assert decide.told == [({"x": (2, 3), "y": (2, 3)}, {"times": 3})]


def test_what_is_not_given_is_its_default() -> None:
    decide = _Decisions()
    _run(decide, lambda f: lambda x: f(x))(torch.ones(2))
    assert decide.told == [({"x": (2,)}, {"times": 2})]


def test_without_a_text_the_function_is_traced_as_ever() -> None:
    run = _run(_Decisions(""), lambda f: lambda x: f(x, x))
    torch.testing.assert_close(run(torch.ones(2)), torch.full((2,), 4.0))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.vmap(lambda x: f(x)),
        lambda f: torch.func.grad(lambda x: f(x).sum()),
        lambda f: lambda x: torch.func.vjp(f, x)[1](x)[0],
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1],
    ],
    ids=["vmap", "grad", "vjp", "jvp"],
)
def test_under_a_transform_the_function_is_traced_as_ever(transform: Callable[[Any], Callable[..., Any]]) -> None:
    decide = _Decisions()
    run = _run(decide, transform)
    x = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(run(x), transform(_function())(x))
    assert decide.told == []


def test_nor_is_it_taken_where_tangents_are() -> None:
    decide = _Decisions()
    substitution.substitute(function := _function(), ("x", "y"), ("times",), decide, _taken)

    @torch.compile(backend=_ours)
    def run(x: Tensor) -> Any:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x + 1)  # type: ignore[no-untyped-call]
            return forward_ad.unpack_dual(function(dual)).tangent  # type: ignore[no-untyped-call]

    x = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(run(x), (x + 1) * 2)
    assert decide.told == []


@pytest.mark.parametrize("call", [lambda f: lambda x: f(x, more=3), lambda f: lambda x: f(x, times=x)])
def test_what_is_not_understood_is_left_alone(call: Callable[[Any], Callable[..., Any]]) -> None:
    decide = _Decisions()
    _run(decide, call)(torch.ones(2))
    assert decide.told == []


def test_other_backends_ask_nothing() -> None:
    decide = _Decisions()
    run = _run(decide, lambda f: lambda x: f(x, x), _other)
    torch.testing.assert_close(run(torch.ones(2)), torch.full((2,), 4.0))
    assert decide.told == []


def test_both_backends_have_their_own_code_of_one_function() -> None:
    decide, function = _Decisions(), _function()
    substitution.substitute(function, ("x", "y"), ("times",), decide, _taken)
    ours, other = (torch.compile(lambda x: function(x), backend=one) for one in (_ours, _other))
    assert float(ours(torch.ones(()))) == 2 + len("taken")
    assert float(other(torch.ones(()))) == 2


def test_nothing_is_compiled_outside_of_a_compilation() -> None:
    assert substitution.compiling_for() == (None, {})


def test_the_backend_under_way_is_known_with_its_options() -> None:
    found: list[Any] = []

    def backend(gm: fx.GraphModule, _: Sequence[Any], **settings: Any) -> Callable[..., Any]:
        found.append(substitution.compiling_for())
        return gm.forward

    torch.compile(lambda x: x + 1, backend=backend, options={"some": 1})(torch.ones(2))
    ((own, settings),) = found
    assert own is backend
    assert settings["options"] == {"some": 1}


def test_floats_are_doubles_while_widened() -> None:
    with substitution.Widened():
        x = torch.zeros(2, dtype=torch.float32).to(torch.float32)
        assert x.dtype is torch.float64
        assert torch.ones(2, dtype=torch.float16).float().dtype is torch.float64


def test_apart_has_gradients_and_its_own_random_numbers() -> None:
    torch.manual_seed(1)
    wanted = torch.rand(2)
    torch.manual_seed(1)
    with torch.no_grad(), substitution.outside_compilation():
        assert torch.is_grad_enabled()
        torch.rand(5)
    torch.testing.assert_close(torch.rand(2), wanted)


def test_a_trace_has_the_ops_of_a_function() -> None:
    graph = substitution.traced(lambda x: x.exp() + 1, [torch.ones(2)])
    assert [str(node.target) for node in graph.nodes if node.op == "call_function"] == [
        "aten.exp.default",
        "aten.add.Tensor",
    ]
