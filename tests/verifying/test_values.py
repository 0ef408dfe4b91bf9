"""Values of a model's run, computed again from recorded ones, and whole graphs interpreted in other numbers."""

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
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.verifying.interpreting import Arithmetic, Noise, current_autocast, interpret, with_rows
from attn_compiler.verifying.values import Body, Key, NoValueError, Values
from tests.passes.compiling import captured


class _Recorded:
    """The mirror of a function, and the values of its inputs. known: all nodes of Dynamo's graph."""

    def __init__(self, function: Any, *inputs: Tensor, known: bool = False) -> None:
        gm, self.mirror = captured(function, *inputs)
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        names = frozenset(n.name for n in (gm.graph.nodes if known else placeholders))
        self.body = Body(index=3, original=names, rewritten=fx.Graph(), mirror=self.mirror)
        recorded = {Key(3, node.name): x for node, x in zip(placeholders, inputs, strict=True)}
        self.values = Values(bodies={self.mirror.graph: self.body}, recorded=recorded)

    def node(self, name: str) -> fx.Node:
        nodes = [n for n in self.mirror.graph.nodes if n.op == "call_function"]
        (node,) = (n for n in nodes if str(n.target).split(".")[1] == name)
        return node

    def needs(self, node: fx.Node, version: Version | None = None) -> set[Key]:
        return self.values.needs(lambda asked: asked.mirror(node) if version is None else asked.at(version))


def test_values_are_computed_from_what_was_recorded() -> None:
    x = torch.randn(3, 4)
    found = _Recorded(lambda x: (x + 1).mT.cos(), x)
    assert found.needs(found.node("cos")) == {Key(3, n) for n in found.body.original}
    torch.testing.assert_close(found.values.mirror(found.node("cos")), (x + 1).mT.cos())
    constant = _Recorded(lambda x: x * torch.tensor([2.0, 3.0]), torch.ones(2))
    assert constant.values.mirror(constant.node("mul")).tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: F.dropout(x, 0.5).cos(), "random"),
        (lambda x: x.clone().add_(1).cos(), "in place"),
        (lambda x: F.dropout(x, 0.0).cos(), None),
        (lambda x: F.dropout(x, 0.5, training=False).cos(), None),
    ],
)
def test_what_is_random_or_written_has_none(function: Callable[..., Tensor], why: str | None) -> None:
    found = _Recorded(function, torch.ones(3))
    if why is None:
        assert found.needs(found.node("cos"))
    else:
        with pytest.raises(NoValueError, match=why):
            found.needs(found.node("cos"))
    other = _Recorded(torch.cos, torch.ones(3))
    with pytest.raises(NoValueError, match="not recorded"):
        found.needs(other.node("cos"))


def test_what_is_held_between_two_writes_inside_of_one_call_has_none() -> None:
    found = _Recorded(lambda x: F.relu(x + 1, inplace=True).cos(), torch.ones(3), known=True)
    relu = next(n for n in found.mirror.graph.nodes if mutation.writes(n))
    source = relu.all_input_nodes[0]
    before, after = (mutation.version(found.mirror, source, found.mirror.order(relu) + i) for i in (0, 1))
    assert found.needs(source, before) == {Key(3, "add", None, copied=True)}
    assert found.needs(source, after) == {Key(3, "add", found.mirror.owner(relu).name)}
    found.body.names.pop(source)
    with pytest.raises(NoValueError, match="written in place"):
        found.needs(source, after)


def test_another_dtype_takes_the_place_of_every_floating_one() -> None:
    found, x = _Recorded(lambda x: x.softmax(-1, dtype=torch.bfloat16), torch.ones(3)), torch.ones(3).double()
    for dtype, expected in ((torch.float64, torch.float64), (None, torch.bfloat16)):
        assert found.values.call(found.node("softmax"), lambda _: x, dtype=dtype).dtype == expected


def test_sizes() -> None:
    s0, s1 = sympy.symbols("s0 s1", integer=True, positive=True)
    values = Values(bodies={}, symbols={"s0": 6})
    assert (values.size(2 * s0 + 1), values.size(sympy.Integer(4))) == (13, 4)
    with pytest.raises(NoValueError, match="s1"):
        values.size(s0 + s1)


def test_new_nodes_are_computed_and_the_others_are_not() -> None:
    graph = fx.Graph()
    x, old, y = (graph.placeholder(name) for name in ("x", "old_out", "y"))
    last = graph.call_method("mul", (graph.call_function(torch.add, (x, old)), 10))
    names, mirror = frozenset({"x", "old_out"}), _Recorded(torch.cos, torch.ones(3)).mirror
    body = Body(index=0, original=names, rewritten=graph, mirror=mirror, outs={last.name: "old_out"})
    values = Values(bodies={}, recorded={Key(0, "x"): torch.ones(2), Key(0, "old_out"): torch.tensor([1.0, 2.0])})
    assert values.needs(lambda asked: asked.rewritten(body, last)) == {Key(0, "x"), Key(0, "old_out")}
    # At the site itself its own new output is computed; anywhere below, the model's own value stands for it.
    assert values.rewritten(body, last).tolist() == [20.0, 30.0]
    assert values.rewritten(body, graph.call_function(torch.neg, (last,))).tolist() == [-1.0, -2.0]
    with pytest.raises(NoValueError, match="y of the rewritten graph"):
        values.rewritten(body, graph.call_function(torch.neg, (y,)))


# ---- a whole graph --------------------------------------------------------------------------------------------------

WIDE = Arithmetic(dtype=torch.float64)
X = torch.linspace(-1, 1, 9).reshape(3, 3)


def _noisy(seed: int) -> Arithmetic:
    return Arithmetic(dtype=torch.float64, noise=Noise(seed=seed))


def _graph(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """Dynamo's graph."""
    found: list[fx.GraphModule] = []
    torch._dynamo.reset()
    torch.compile(function, backend=lambda gm, _: found.append(gm) or gm.forward)(*args)
    torch._dynamo.reset()
    (module,) = found
    return module


def _run(function: Callable[..., Any], *args: Tensor, arithmetic: Arithmetic) -> Tensor:
    (out,) = interpret(_graph(function, *args), args, arithmetic)
    return out


def with_dtypes(x: Tensor) -> Tensor:
    y = x.to(torch.bfloat16).float() + x.half().double().bfloat16()
    return (y.softmax(-1, dtype=torch.float32) + torch.zeros(3, dtype=torch.float16) + torch.full((3,), 0.1)).float()


def with_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x.T


def with_checkpoint(x: Tensor) -> Tensor:
    return checkpoint(with_autocast, x / 3, use_reentrant=False)


def rotated(x: Tensor) -> Tensor:
    angles = torch.polar(torch.ones(3, dtype=x.dtype), torch.arange(3, dtype=x.dtype) / 3)
    return torch.view_as_real(torch.view_as_complex(torch.stack([x, x], -1)) * angles).flatten(-2)


def written(x: Tensor) -> Tensor:
    y = x * 2
    y[0].mul_(3)
    y.data.add_(1)
    return y.T + 0


@pytest.mark.parametrize(
    ("function", "exact", "tolerance"),
    [
        (lambda x: x.exp() / 3, None, 1e-14),
        # A number of Python's that PyTorch rounds to float32 itself stays that.
        (with_dtypes, lambda x: (2 * x).softmax(-1) + torch.full((3,), 0.1), 1e-8),
        (with_autocast, lambda x: x @ x.T, 1e-14),
        (with_checkpoint, lambda x: (x / 3) @ (x / 3).T, 1e-14),
        (rotated, None, 1e-14),
        (written, None, 1e-14),
    ],
)
def test_wide_numbers_are_exact(function: Any, exact: Any, tolerance: float) -> None:
    """All the way: a single result in float32 would be off by 1e-8. Writes in place are seen by others, with noise, too."""
    given = X.clone().requires_grad_(function is with_checkpoint)
    out, expected = _run(function, given, arithmetic=WIDE).detach(), (exact or function)(X.double())
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
    noisy = _run(function, given, arithmetic=_noisy(0)).detach()
    assert 0 < float((noisy - out).abs().max()) < 1e-4 or function in (with_autocast, with_checkpoint)


def test_whole_numbers_stay_what_they_are() -> None:
    assert _run(lambda x: (x > 0).long().sum(-1), X, arithmetic=WIDE).tolist() == [0, 1, 3]


@pytest.mark.parametrize(("dtype", "at_most"), [(torch.float32, 16 * 2**-23), (torch.bfloat16, 2 * 2**-7)])
def test_noise_is_as_large_as_rounding_may_be(dtype: torch.dtype, at_most: float) -> None:
    x = torch.ones(64, 64, dtype=dtype)
    exact, one, same, other = (_run(lambda x: x * 1, x, arithmetic=a) for a in (WIDE, _noisy(0), _noisy(0), _noisy(1)))
    assert at_most / 2 < (one - exact).abs().max() <= at_most
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_noise_reaches_gradients_that_are_nothing_but_rounding() -> None:
    """The sum of a softmax is 1, whatever is added to all scores."""
    found = []
    for arithmetic in (WIDE, _noisy(0)):
        leaf, bias = torch.zeros((), dtype=torch.float64, requires_grad=True), torch.zeros((), requires_grad=True)
        module = _graph(lambda x, bias: ((x + bias) * 1).softmax(-1) @ x, X, bias)
        (out,) = interpret(module, [X.double(), leaf], arithmetic)
        found.append(float(torch.autograd.grad(out.sin().sum(), leaf)[0].abs()))
    assert found[0] < 1e-14
    assert 1e-8 < found[1] < 1e-4


def test_bodies_are_as_they_were_afterwards_and_a_record_may_replace_a_value() -> None:
    module = _graph(with_checkpoint, X.clone().requires_grad_())
    before = {name: set(body.__dict__) for name, body in module.named_modules()}
    interpret(module, [X], WIDE)
    assert {name: set(body.__dict__) for name, body in module.named_modules()} == before
    module = _graph(lambda x: x.sin() + 1, X)
    (out,) = interpret(module, [X], Arithmetic(), lambda node, value: value * 0 if node.target == "sin" else value)
    assert out.tolist() == torch.ones(3, 3).tolist()


def test_autocast_again() -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        again = current_autocast([torch.device("cpu"), torch.device("meta")])
    with again(True):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16
        with again(False):
            assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu"), current_autocast([])(False):
        assert torch.is_autocast_enabled("cpu")


# ---- SDPA as the model called it ---------------------------------------------------------------------------------


def test_a_mask_of_one_axis_gets_a_second_one() -> None:
    q, mask, of_rows, sdpa = torch.ones(1, 1, 2, 4), torch.ones(2), torch.ones(2, 2), F.scaled_dot_product_attention
    args, kwargs = with_rows(sdpa, (q, q, q, mask), {"scale": 1.0})
    assert (args[3].shape, kwargs) == ((1, 2), {"scale": 1.0})
    assert with_rows(sdpa, (q, q, q), {"attn_mask": mask})[1]["attn_mask"].shape == (1, 2)
    for x in (None, of_rows):
        assert with_rows(sdpa, (q, q, q, x), {})[0][3] is x
    assert with_rows(torch.mul, (q, 2), {}) == ((q, 2), {})


@pytest.mark.parametrize("written_out", [False, True])
def test_a_bias_of_one_axis_that_wants_a_gradient_is_verified(written_out: bool) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        if written_out:
            return (q @ k.mT * 0.5 + bias).softmax(-1) @ v
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    given = [*(torch.randn(2, 2, 3, 4, requires_grad=True) for _ in range(3)), torch.randn(3, requires_grad=True)]
    options = {"verify": True, "strict": True, "inner": "aot_eager"}
    compiled = torch.compile(attention, backend="attn_compiler", options=options)
    torch.testing.assert_close(compiled(*given), attention(*given))
    assert attn_compiler.reports()
