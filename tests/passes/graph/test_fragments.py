"""Equal parts of a graph are traced once, and the mirror is the one that tracing every node gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from attn_compiler.passes.graph import fragments, mirror as mirror_module, relevance, unit
from attn_compiler.torch_private import compat as torch_compat, tracing as torch_tracing
from tests.passes import mirror_equality
from tests.passes.compiling import mark

LAYERS = 3


def _modules(
    function: Callable[..., Any], inputs: Sequence[Any], *, dynamic: bool | None = None
) -> list[fx.GraphModule]:
    """The graph that Dynamo captures, and every body in it whose inputs are known."""
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        known = [m for m in torch_compat.graph_modules(gm) if all(map(_has_value, m.graph.nodes))]
        for module in known:
            _check(module)
        found.extend(known)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    return found


def _has_value(node: fx.Node) -> bool:
    return node.op != "placeholder" or "example_value" in node.meta


def _check(module: fx.GraphModule) -> None:
    mode = torch_tracing.fake_mode_of_values(unit.examples(module))
    assert mode is not None
    for skipped in (frozenset[fx.Node](), relevance.skippable(module.graph, unit.is_anchor_like)):
        with torch_tracing.tracing_in(mode):
            plain = mirror_equality.plain(module, skipped)
            again = mirror_module.build(module, skipped)
        assert (difference := mirror_equality.difference(again, plain)) is None, difference


@pytest.fixture
def made() -> Iterator[list[str]]:
    """The targets of the Dynamo nodes that were made again."""
    targets: list[str] = []
    call = fragments.Fragments.call

    def watched(self: fragments.Fragments, node: fx.Node, *others: Any) -> fragments.NodeCall | None:
        found = call(self, node, *others)
        if found is not None and found.fragment is not None and not found.is_untraced:
            targets.append(str(node.target))
        return found

    with mock.patch.object(fragments.Fragments, "call", watched):
        yield targets


def _attention(x: Tensor, weight: Tensor) -> Tensor:
    q, k, v = (F.linear(x, w).unflatten(-1, (2, 4)).transpose(1, 2) for w in weight.chunk(3))
    scores = (q @ k.transpose(-2, -1) * 0.5).float()
    return (scores.softmax(-1).to(q.dtype) @ v).transpose(1, 2).flatten(-2)


def _layers(layer: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(LAYERS):
            x = x + layer(x, weight)
        return x

    return function


def _autocast(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        inside = _attention(x, weight)
    return _attention(x, weight) + inside.float()


def _no_grad(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        table = x.detach().mean(-1, keepdim=True).cos()
    return _attention(x * table, weight)


def _in_place(x: Tensor, weight: Tensor) -> Tensor:
    y = _attention(x, weight)
    y += x.view(x.shape)
    y[:, :2] = 1.0
    y.transpose(0, 1).mul_(2.0)
    return y.contiguous()


def _same_tensor(x: Tensor, weight: Tensor) -> Tensor:
    """Casts to the dtype that is there, and copies that are none: the input itself comes back."""
    y = x.to(x.dtype).float().contiguous()
    return _attention(y, weight) * y.to(torch.float32) + x.expand(x.shape)


def _pieces(x: Tensor, weight: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    third, fourth = torch.split(x, [3, 5], dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return _attention(rotated + torch.cat([third, fourth], -1), weight) + x[:, None, ..., :].squeeze(1)


def _dropped(x: Tensor, weight: Tensor) -> Tensor:
    return F.dropout(_attention(x, weight), 0.5, training=True) + torch.rand_like(x)


def _under_checkpoint(x: Tensor, weight: Tensor) -> Tensor:
    return checkpoint(lambda a: _attention(a, weight) + _attention(a * 2, weight), x, use_reentrant=False)  # type: ignore[no-any-return]


def _masked(x: Tensor, weight: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    allowed = torch.vmap(torch.vmap(lambda q, k: q >= k, (None, 0)), (0, None))(at, at)
    return _attention(x, weight) + allowed.float().sum(-1)[:, None]


def _constants(x: Tensor, weight: Tensor) -> Tensor:
    return _attention(x, weight) * torch.tensor(0.5) + x.new_zeros(()) + torch.full((8,), 2.0)


def _complex(x: Tensor, weight: Tensor) -> Tensor:
    z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return _attention(torch.view_as_real(z * z.conj()).flatten(-2), weight)


CASES = (
    _attention,
    _autocast,
    _no_grad,
    _in_place,
    _same_tensor,
    _pieces,
    _dropped,
    _under_checkpoint,
    _masked,
    _constants,
    _complex,
)


#: dynamic axes, and whether there are gradients
_HOW = (
    pytest.param((), False, id="static-inference"),
    pytest.param((), True, id="static-training"),
    pytest.param((0, 1), True, id="dynamic-training"),
    pytest.param((0, 1), False, id="dynamic-inference"),
)


@pytest.mark.in_turns
@pytest.mark.parametrize(("dynamic", "training"), _HOW)
@pytest.mark.parametrize("layer", CASES, ids=lambda layer: layer.__name__.strip("_"))
def test_the_mirror_of_equal_layers_is_the_plain_one(
    layer: Callable[[Tensor, Tensor], Tensor], dynamic: tuple[int, ...], training: bool, made: list[str]
) -> None:
    x, weight = torch.randn(2, 6, 8), torch.randn(24, 8, requires_grad=training)
    with torch.set_grad_enabled(training):
        assert _modules(_layers(layer), [mark(x, dynamic), weight])
    assert made


def _differing(*changed: Callable[[Tensor], Tensor]) -> Callable[[Tensor], list[Tensor]]:
    return lambda x: [change(x) for change in changed]


NEARLY_ALIKE = {
    "numbers of other types": _differing(
        lambda x: x * 1, lambda x: x * 1.0, lambda x: x * True, lambda x: x + 0.0, lambda x: x + -0.0
    ),
    "other dtypes": _differing(lambda x: x.double() * 2, lambda x: x.float() * 2, lambda x: x.bfloat16() * 2),
    "other strides": _differing(lambda x: x.reshape(-1), lambda x: x.mT.reshape(-1), lambda x: x.mT.contiguous()),
    "other offsets": _differing(lambda x: x[:, 1:].mT, lambda x: x[:, 2:].mT, lambda x: x[:, :-1].mT),
    "the same tensor twice": _differing(
        lambda x: x + x, lambda x: x + x.clone(), lambda x: x.mT @ x, lambda x: x.mT @ x.clone()
    ),
    "the same memory": _differing(lambda x: x + x[:], lambda x: x + x.clone()[:], lambda x: x[:] + x[:]),
    "gradients": _differing(lambda x: x.detach() * 2, lambda x: x * 2, lambda x: x.detach() * 2),
    "other slices": _differing(
        lambda x: x[0], lambda x: x[0:1], lambda x: x[None], lambda x: x[..., 0], lambda x: x[True]
    ),
    "lists and tuples": _differing(
        lambda x: x.permute([0, 2, 1]), lambda x: x.permute((0, 2, 1)), lambda x: x.permute(0, 2, 1)
    ),
}


@pytest.mark.parametrize("case", NEARLY_ALIKE)
def test_what_is_only_nearly_alike_is_traced_itself(case: str) -> None:
    x = torch.randn(2, 6, 6, requires_grad=True)
    _modules(NEARLY_ALIKE[case], [x])
    _modules(lambda x: NEARLY_ALIKE[case](x) + NEARLY_ALIKE[case](x), [x])


def test_a_gradient_and_the_grad_mode_are_told_apart(made: list[str]) -> None:
    """A mirror's values have no gradient, so that the graphs would be the same: but some of PyTorch's functions ask for it."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            there = x.neg(), y.neg()
        return *there, x.neg(), y.neg()

    _modules(function, [torch.randn(4), torch.randn(4, requires_grad=True)])
    assert not made


def test_sizes_that_are_known_at_run_time_only_are_traced_each_time(made: list[str]) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return x.nonzero().neg(), x.nonzero().neg(), x.neg(), x.neg()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        _modules(function, [torch.randn(4)])
    assert made
    assert not any("nonzero" in target for target in made)


@pytest.mark.parametrize("dynamic", [(), (0, 1)], ids=["known", "symbolic"])
def test_each_layer_but_the_first_is_made_again(dynamic: tuple[int, ...], made: list[str]) -> None:
    _modules(_layers(_attention), [mark(torch.randn(2, 6, 8), dynamic), torch.randn(24, 8)])
    # One layer more than is new, in the mirror that leaves out nothing and in the other; the three projections of a layer are alike.
    assert made.count("matmul") + made.count("<built-in function matmul>") == 2 * 2 * (LAYERS - 1)


def test_a_function_of_somebody_elses_is_called_each_time(made: list[str]) -> None:
    calls: list[int] = []

    @torch.compiler.allow_in_graph
    def somebody_elses(x: Tensor) -> Tensor:
        calls.append(1)
        return x * 2

    _modules(lambda x: somebody_elses(somebody_elses(x).neg()).neg(), [torch.randn(4)])
    assert not any("somebody_elses" in target for target in made)
    assert any("neg" in target for target in made)


def test_a_tensor_that_is_written_to_is_traced_each_time(made: list[str]) -> None:
    """Autograd refuses to write to what no op has made."""
    linear = nn.Linear(4, 4)

    def function(x: Tensor) -> Tensor:
        for _ in range(LAYERS):
            y = x.unsqueeze(0) * linear.weight
            y += x
            x = y.squeeze(0).cos()
        return x

    _modules(function, [torch.randn(4, 4)])
    assert not any("mul" in target for target in made)
    assert any("cos" in target for target in made)


def test_a_call_that_may_change_what_others_do_ends_what_is_known(made: list[str]) -> None:
    def graph() -> fx.GraphModule:
        g = fx.Graph()
        x = g.placeholder("x")
        first = g.call_function(torch.cos, (x,))
        g.call_function(torch.use_deterministic_algorithms, (False,))
        second = g.call_function(torch.cos, (x,))
        g.output((first, second))
        with torch._subclasses.FakeTensorMode() as mode:
            value = torch.empty(3)
        del mode
        for node in (x, first, second):
            node.meta["example_value"] = value
        return fx.GraphModule({}, g)

    _check(graph())
    assert not made


class _Layer(nn.Module):
    """With numbers of its own, as a layer has a probability of its dropout."""

    def __init__(self, dropped: float, factor: float) -> None:
        super().__init__()
        self.dropped, self.factor = dropped, factor

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = (F.linear(x, w).unflatten(-1, (2, 4)).transpose(1, 2) for w in weight.chunk(3))
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropped).transpose(1, 2).flatten(-2)
        return F.dropout(out * self.factor, self.dropped, training=True)


class _Model(nn.Module):
    def __init__(self, numbers: Sequence[tuple[float, float]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(*each) for each in numbers)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, weight)
        return x


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    ("numbers", "again"),
    [([(0.1, 3.0)] * 3, 2), ([(0.1, 3.0), (0.2, 3.0), (0.1, 5.0)], 1)],
    ids=["of one value", "of several"],
)
def test_symbolic_floats_are_those_of_the_layer(
    numbers: list[tuple[float, float]], again: int, training: bool, made: list[str]
) -> None:
    x, weight = torch.randn(2, 6, 8), torch.randn(24, 8, requires_grad=training)
    with torch.set_grad_enabled(training):
        (graph_module,) = _modules(_Model(numbers), [x, weight], dynamic=True)
    values = [node.meta.get("example_value") for node in graph_module.graph.nodes]
    assert any(isinstance(value, torch.SymFloat) for value in values)
    # In the mirror that leaves out nothing and in the other.
    assert sum("scaled_dot_product" in name for name in made) == 2 * again
