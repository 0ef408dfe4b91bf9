"""Values of a model's run, interpreted and computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

import attn_compiler
from attn_compiler.passes.graph import mutation
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.verifying.interpreting import Arithmetic, Autocast, Noise, interpret, with_rows
from attn_compiler.verifying.values import Body, Key, NoValueError, Values
from tests.passes.compiling import captured


class _Recorded:
    """The mirror of a function, and the values of some of its Dynamo nodes."""

    def __init__(self, function: Any, *inputs: Tensor, known: tuple[str, ...] | None = None) -> None:
        gm, self.mirror = captured(function, *inputs)
        self.gm = gm
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        names = frozenset(n.name for n in (placeholders if known is None else gm.graph.nodes))
        self.body = Body(index=3, original=names, rewritten=fx.Graph(), mirror=self.mirror)
        self.values = Values(bodies={self.mirror.graph: self.body})
        for node, x in zip(placeholders, inputs, strict=True):
            self.values.recorded[Key(3, node.name)] = x

    def node(self, name: str) -> fx.Node:
        return _named(self.mirror, name)


def _named(mirror: Mirror, name: str) -> fx.Node:
    (node,) = (n for n in mirror.graph.nodes if n.op == "call_function" and str(n.target).split(".")[1] == name)
    return node


def _needs(found: _Recorded, node: fx.Node, version: Version | None = None) -> set[Key]:
    return found.values.needs(lambda asked: asked.mirror(node) if version is None else asked.at(version))


def test_values_are_computed_from_what_was_recorded() -> None:
    x = torch.randn(3, 4)
    found = _Recorded(lambda x: (x + 1).mT.cos(), x)
    assert _needs(found, found.node("cos")) == {Key(3, n) for n in found.body.original}
    torch.testing.assert_close(found.values.mirror(found.node("cos")), (x + 1).mT.cos())


def test_constants_of_the_graph_have_values() -> None:
    found = _Recorded(lambda x: x * torch.tensor([2.0, 3.0]), torch.ones(2))
    assert found.values.mirror(found.node("mul")).tolist() == [2.0, 3.0]


def test_what_is_random_or_written_or_opaque_has_none() -> None:
    def random(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5).cos()

    def written(x: Tensor) -> Tensor:
        return x.clone().add_(1).cos()

    for function, why in ((random, "random"), (written, "in place")):
        found = _Recorded(function, torch.ones(3))
        with pytest.raises(NoValueError, match=why):
            _needs(found, found.node("cos"))


def test_what_is_held_between_two_writes_inside_of_one_call_has_none() -> None:
    def function(x: Tensor) -> Tensor:
        return F.relu(x + 1, inplace=True).cos()

    found = _Recorded(function, torch.ones(3), known=("all",))
    relu = next(n for n in found.mirror.graph.nodes if mutation.writes(n))
    source = relu.all_input_nodes[0]
    before, after = (mutation.version(found.mirror, source, found.mirror.order(relu) + i) for i in (0, 1))
    assert _needs(found, source, before) == {Key(3, "add", None, copied=True)}
    assert _needs(found, source, after) == {Key(3, "add", found.mirror.owner(relu).name)}
    found.body.names.pop(source)
    with pytest.raises(NoValueError, match="written in place"):
        _needs(found, source, after)


def test_dropout_that_drops_nothing_is_not_random() -> None:
    for function in (lambda x: F.dropout(x, 0.0).cos(), lambda x: F.dropout(x, 0.5, training=False).cos()):
        found = _Recorded(function, torch.ones(3))
        assert _needs(found, found.node("cos"))


def test_a_node_of_another_graph_has_none() -> None:
    found, other = (_Recorded(torch.cos, torch.ones(3)) for _ in range(2))
    with pytest.raises(NoValueError, match="not recorded"):
        _needs(found, other.node("cos"))


def test_another_dtype_takes_the_place_of_every_floating_one() -> None:
    found = _Recorded(lambda x: x.softmax(-1, dtype=torch.bfloat16), torch.ones(3))
    node = found.node("softmax")
    x = torch.ones(3, dtype=torch.float64)
    assert found.values.call(node, lambda _: x, dtype=torch.float64).dtype == torch.float64
    assert found.values.call(node, lambda _: x).dtype == torch.bfloat16


def test_sizes() -> None:
    s0, s1 = sympy.symbols("s0 s1", integer=True, positive=True)
    values = Values(bodies={}, symbols={"s0": 6})
    assert values.size(2 * s0 + 1) == 13
    assert values.size(sympy.Integer(4)) == 4
    with pytest.raises(NoValueError, match="s1"):
        values.size(s0 + s1)


def test_new_nodes_are_computed_and_the_others_are_not() -> None:
    graph = fx.Graph()
    x, old = graph.placeholder("x"), graph.placeholder("old_out")
    new = graph.call_function(torch.add, (x, old))
    last = graph.call_method("mul", (new, 10))
    found = _Recorded(torch.cos, torch.ones(3))
    body = Body(
        index=0, original=frozenset({"x", "old_out"}), rewritten=graph, mirror=found.mirror, outs={last.name: "old_out"}
    )
    values = Values(bodies={}, recorded={Key(0, "x"): torch.ones(2), Key(0, "old_out"): torch.tensor([1.0, 2.0])})
    assert values.needs(lambda asked: asked.rewritten(body, last)) == {Key(0, "x"), Key(0, "old_out")}
    # At the site itself its own new output is computed; anywhere below, the model's own value stands for it.
    assert values.rewritten(body, last).tolist() == [20.0, 30.0]
    below = graph.call_function(torch.neg, (last,))
    assert values.rewritten(body, below).tolist() == [-1.0, -2.0]


def test_an_input_that_only_the_rewritten_graph_has_is_refused() -> None:
    graph = fx.Graph()
    y = graph.placeholder("y")
    found = _Recorded(torch.cos, torch.ones(3))
    body = Body(index=0, original=frozenset(), rewritten=graph, mirror=found.mirror)
    with pytest.raises(NoValueError, match="y of the rewritten graph"):
        found.values.rewritten(body, graph.call_function(torch.neg, (y,)))


WIDE = Arithmetic(dtype=torch.float64)


def captured_interpreting(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """Dynamo's graph."""
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*args)
    torch._dynamo.reset()
    (module,) = found
    return module


def run(function: Callable[..., Any], *args: Tensor, arithmetic: Arithmetic) -> Tensor:
    (out,) = interpret(captured_interpreting(function, *args), args, arithmetic)
    return out


def thirds(x: Tensor) -> Tensor:
    return x.exp() / 3


def with_dtypes(x: Tensor) -> Tensor:
    y = x.to(torch.bfloat16).float() + x.half().double().bfloat16()
    return (y.softmax(-1, dtype=torch.float32) + torch.zeros(3, dtype=torch.float16) + torch.full((3,), 0.1)).float()


def with_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x.T


def with_checkpoint(x: Tensor) -> Tensor:
    return checkpoint(with_autocast, x / 3, use_reentrant=False)


def rotated(x: Tensor) -> Tensor:
    angles = torch.polar(torch.ones(3), torch.arange(3, dtype=torch.float32) / 3)
    return torch.view_as_real(torch.view_as_complex(torch.stack([x, x], -1)) * angles).flatten(-2)


X = torch.linspace(-1, 1, 9).reshape(3, 3)


@pytest.mark.parametrize("function", [thirds, with_dtypes, with_autocast, with_checkpoint, rotated])
def test_wide_numbers_are_exact(function: Callable[..., Tensor]) -> None:
    """All the way: a single result in float32 would be off by 1e-8."""
    exact = {
        thirds: lambda x: x.exp() / 3,
        with_dtypes: lambda x: (2 * x).softmax(-1) + torch.full((3,), 0.1),
        with_autocast: lambda x: x @ x.T,
        with_checkpoint: lambda x: (x / 3) @ (x / 3).T,
        rotated: lambda x: torch.view_as_real(
            torch.view_as_complex(torch.stack([x, x], -1))
            * torch.polar(torch.ones(3, dtype=torch.float64), torch.arange(3, dtype=torch.float64) / 3)
        ).flatten(-2),
    }[function]
    inputs = X.clone().requires_grad_(function is with_checkpoint)
    out = run(function, inputs, arithmetic=WIDE)
    assert out.dtype == torch.float64
    # A number of Python's that PyTorch rounds to float32 itself stays that.
    tolerance = 1e-8 if function is with_dtypes else 1e-14
    torch.testing.assert_close(out.detach(), exact(X.double()), rtol=0, atol=tolerance)


def test_whole_numbers_stay_what_they_are() -> None:
    out = run(lambda x: (x > 0).long().sum(-1), X, arithmetic=WIDE)
    assert out.tolist() == [0, 1, 3]


def test_what_is_written_in_place_is_seen_by_others() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        y[0].mul_(3)
        y.data.add_(1)
        return y.T + 0

    for noise in (None, Noise(seed=0)):
        out = run(function, X, arithmetic=Arithmetic(dtype=torch.float64, noise=noise))
        torch.testing.assert_close(out, function(X.double()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "at_most"), [(torch.float32, 16 * 2**-23), (torch.bfloat16, 2 * 2**-7)])
def test_noise_is_as_large_as_rounding_may_be(dtype: torch.dtype, at_most: float) -> None:
    x = torch.ones(64, 64, dtype=dtype)
    exact = run(lambda x: x * 1, x, arithmetic=WIDE)
    one, same, other = (
        run(lambda x: x * 1, x, arithmetic=Arithmetic(dtype=torch.float64, noise=Noise(seed=seed)))
        for seed in (0, 0, 1)
    )
    assert at_most / 2 < (one - exact).abs().max() <= at_most
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_noise_reaches_gradients_that_are_nothing_but_rounding() -> None:
    """The sum of a softmax is 1, whatever is added to all scores."""

    def function(x: Tensor, bias: Tensor) -> Tensor:
        return ((x + bias) * 1).softmax(-1) @ x

    x, bias = X.double(), torch.zeros((), dtype=torch.float64)
    found = []
    for noise in (None, Noise(seed=0)):
        leaf = bias.clone().requires_grad_()
        module = captured_interpreting(function, X, torch.zeros((), requires_grad=True))
        (out,) = interpret(module, [x, leaf], Arithmetic(dtype=torch.float64, noise=noise))
        found.append(float(torch.autograd.grad(out.sin().sum(), leaf)[0].abs()))
    assert found[0] < 1e-14
    assert 1e-8 < found[1] < 1e-4


def test_bodies_are_as_they_were_afterwards() -> None:
    module = captured_interpreting(with_checkpoint, X.clone().requires_grad_())
    before = {name: dict(body.__dict__) for name, body in module.named_modules()}
    interpret(module, [X], WIDE)
    assert {name: set(body.__dict__) for name, body in module.named_modules()} == {n: set(d) for n, d in before.items()}


def test_record_says_what_takes_a_value_s_place() -> None:
    module = captured_interpreting(lambda x: x.sin() + 1, X)
    (out,) = interpret(module, [X], record=lambda node, value: value * 0 if node.target == "sin" else value)
    assert out.tolist() == torch.ones(3, 3).tolist()


def test_autocast_again() -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        state = Autocast.current([torch.device("cpu"), torch.device("meta")])
    with state.enter():
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16
        with state.enter(none=True):
            assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu"), Autocast.current([]).enter(none=True):
        assert torch.is_autocast_enabled("cpu")


# ---- SDPA as the model called it ---------------------------------------------------------------------------------


def test_a_mask_of_one_axis_gets_a_second_one() -> None:
    q, mask = torch.ones(1, 1, 2, 4), torch.ones(2)
    args, kwargs = with_rows(F.scaled_dot_product_attention, (q, q, q, mask), {"scale": 1.0})
    assert args[3].shape == (1, 2)
    assert kwargs == {"scale": 1.0}
    _, kwargs = with_rows(F.scaled_dot_product_attention, (q, q, q), {"attn_mask": mask})
    assert kwargs["attn_mask"].shape == (1, 2)


@pytest.mark.parametrize("mask", [None, torch.ones(2, 2)])
def test_the_arguments_of_other_calls_stay(mask: Tensor | None) -> None:
    q = torch.ones(1, 1, 2, 4)
    args, _ = with_rows(F.scaled_dot_product_attention, (q, q, q, mask), {})
    assert args[3] is mask
    assert with_rows(torch.mul, (q, 2), {}) == ((q, 2), {})


@pytest.mark.parametrize("written_out", [False, True])
def test_a_bias_of_one_axis_that_wants_a_gradient_is_verified(written_out: bool) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        if written_out:
            return (q @ k.mT * 0.5 + bias).softmax(-1) @ v
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    given = [torch.randn(2, 2, 3, 4, requires_grad=True) for _ in range(3)]
    bias = torch.randn(3, requires_grad=True)
    options = {"verify": True, "strict": True, "inner": "aot_eager"}
    compiled = torch.compile(attention, backend="attn_compiler", options=options)
    torch.testing.assert_close(compiled(*given, bias), attention(*given, bias))
    assert attn_compiler.reports()
