"""Which calls are one op, with which arguments. That the mirror is the traced one, test_fragments.py asks."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from attn_compiler.passes.graph import whole_calls
from attn_compiler.passes.graph.whole_calls import WholeCall

aten = torch.ops.aten
MODE = FakeTensorMode()


def _x() -> Tensor:
    return MODE.from_tensor(torch.empty(2, 3, 4, 4))


def _read(target: Any, *values: Any, op: str = "call_function", **named: Any) -> tuple[WholeCall | None, list[fx.Node]]:
    """What is read of a call, and the nodes of its tensors."""
    graph, env = fx.Graph(), dict[fx.Node, Any]()

    def node(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        made = graph.placeholder("x")
        env[made] = x
        return made

    call = graph.create_node(op, target, tuple(map(node, values)), {name: node(x) for name, x in named.items()})
    return whole_calls.read(call, env), list(env)


@pytest.mark.parametrize(
    ("target", "op", "found"),
    [
        (torch.matmul, "call_function", aten.matmul.default),
        (operator.matmul, "call_function", aten.matmul.default),
        ("matmul", "call_method", aten.matmul.default),
        (operator.and_, "call_function", aten.bitwise_and.Tensor),
        (torch.add, "call_function", aten.add.Tensor),
        (operator.le, "call_function", aten.le.Tensor),
        (aten.mul.Tensor, "call_function", aten.mul.Tensor),
    ],
)
def test_two_tensors_are_given_to_one_op(target: Any, op: str, found: Any) -> None:
    whole, nodes = _read(target, _x(), _x(), op=op)
    assert whole == WholeCall(op=found, args=tuple(nodes), kwargs={})


def test_arguments_are_where_tracing_has_them() -> None:
    whole, (q, k, v, mask) = _read(F.scaled_dot_product_attention, _x(), _x(), _x(), attn_mask=_x(), scale=0.5)
    assert whole is not None
    assert (whole.args, whole.kwargs) == ((q, k, v, mask), {"scale": 0.5})
    # What comes behind the last that is not the default is left out, and what comes before it is not.
    whole, (q, k, v) = _read(F.scaled_dot_product_attention, _x(), _x(), value=_x(), is_causal=True, enable_gqa=False)
    assert whole is not None
    assert (whole.args, whole.kwargs) == ((q, k, v, None, 0.0, True), {})


@pytest.mark.parametrize(
    "read",
    [
        lambda: _read(torch.mul, _x(), 2.0),
        lambda: _read(torch.add, _x(), _x(), out=_x()),
        lambda: _read(torch.add, _x(), _x(), alpha=0.5),
        lambda: _read(F.scaled_dot_product_attention, _x(), _x(), _x(), None, 0),
        lambda: _read(F.scaled_dot_product_attention, _x(), _x()),
        lambda: _read(F.scaled_dot_product_attention, _x(), _x(), _x(), query=_x()),
        lambda: _read(operator.iadd, _x(), _x()),
        lambda: _read(torch.cat, _x(), _x()),
        lambda: _read(torch.matmul, torch.empty(2, 2), _x()),
    ],
    ids=[
        "a number",
        "out",
        "another type",
        "an integer",
        "too few",
        "twice",
        "in place",
        "other ops",
        "no fake tensor",
    ],
)
def test_other_calls_are_traced(read: Callable[[], tuple[WholeCall | None, Any]]) -> None:
    assert read()[0] is None


def test_calls_under_autocast_are_traced() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert _read(torch.matmul, _x(), _x())[0] is None
    assert _read(torch.matmul, _x(), _x())[0] is not None
