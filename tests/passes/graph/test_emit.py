"""The same calls on fake values and into the graph."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from unittest import mock

import pytest
import sympy
import torch
from torch import Tensor, fx

import attn_compiler
from attn_compiler.passes.graph import axes, emit, mutation
from attn_compiler.passes.graph.axes import AxisError
from attn_compiler.passes.graph.emit import FakeBuilder, GraphBuilder
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.spec.target import Target
from attn_compiler.torch_private.tracing import fake_mode_of_values
from tests.passes.compiling import captured, mark, mirror_of

aten = torch.ops.aten


def _builders(*, grad: bool = False) -> tuple[GraphBuilder, FakeBuilder[Tensor], torch.fx.Node, torch.fx.Node]:
    """(graph builder, fake builder, mirror node of x, mirror node of the output) for x.sin().cos()."""
    x = mark(torch.randn(5, 3, requires_grad=grad), [5])
    gm, mirror = captured(lambda x: x.sin().cos(), x)
    mode = fake_mode_of_values(n.meta.get("example_value") for n in gm.graph.nodes)
    assert mode is not None
    (cos,) = (n for n in mirror.graph.nodes if n.target is aten.cos.default)
    (sin,) = cos.all_input_nodes
    (source,) = sin.all_input_nodes
    return GraphBuilder(gm.graph, mirror, mode), FakeBuilder(mirror, mode), source, cos


def test_both_builders_see_the_same_values() -> None:
    graph, fake, x, out = _builders()
    with graph.at(out, with_grad=False):
        node = graph.call(torch.mul, graph.leaf(x), 2)
    value = fake.call(torch.mul, fake.leaf(x), 2)
    assert graph.value(node).shape == fake.value(value).shape
    assert graph.value(node).stride() == fake.value(value).stride()


def test_methods_of_tensors_are_called_as_dynamo_calls_them() -> None:
    graph, _, x, out = _builders()
    with graph.at(out, with_grad=False):
        node = graph.call(torch.Tensor.to, graph.leaf(x), torch.float64)
    assert (node.op, node.target) == ("call_method", "to")
    assert graph.value(node).dtype == torch.float64


def test_calls_stand_before_the_output_with_its_line_and_module() -> None:
    graph, _, x, out = _builders()
    with graph.at(out, with_grad=False) as old:
        node = graph.call(torch.mul, graph.leaf(x), 2)
    assert node.meta["stack_trace"] == old.meta["stack_trace"]
    order = list(node.graph.nodes)
    assert order.index(node) < order.index(old)


@pytest.mark.parametrize("with_grad", [False, True])
def test_values_want_gradients_where_the_site_does(with_grad: bool) -> None:
    graph, _, x, out = _builders(grad=True)
    with graph.at(out, with_grad=with_grad):
        node = graph.call(torch.mul, graph.leaf(x), 2)
    assert graph.value(node).requires_grad == with_grad


@pytest.mark.parametrize("dynamic", [(), (5,)], ids=["known", "symbolic"])
def test_alike_calls_are_run_once(dynamic: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A site emits for each layer what it emitted for the first."""
    x = mark(torch.randn(5, 3), dynamic)
    gm, mirror = captured(lambda x: (x.sin() + x.cos()).exp(), x)
    mode = fake_mode_of_values(n.meta.get("example_value") for n in gm.graph.nodes)
    assert mode is not None
    graph = GraphBuilder(gm.graph, mirror, mode)
    run, ran = GraphBuilder._run, []

    def watched(self: GraphBuilder, function: Callable[..., object], *given: object) -> object:
        ran.append(function)
        return run(self, function, *given)

    monkeypatch.setattr(GraphBuilder, "_run", watched)
    named = {n.target: n for n in mirror.graph.nodes}
    with graph.at(named[aten.exp.default], with_grad=False):
        for target in (aten.sin.default, aten.cos.default):
            twice = graph.call(torch.mul, graph.leaf(named[target]), 2)
            turned = graph.value(graph.call(torch.Tensor.t, twice))
            assert str(turned.shape) == str(graph.value(twice).t().shape)
            assert turned.untyped_storage()._cdata == graph.value(twice).untyped_storage()._cdata
    assert ran == [torch.mul, torch.Tensor.t]


def test_known_sizes_are_numbers_and_symbolic_ones_come_from_a_tensor() -> None:
    graph, fake, x, out = _builders()
    with graph.at(out, with_grad=False):
        assert graph.size(sympy.Integer(7), []) == 7
        length = axes.size_expr(graph.value(graph.leaf(x)).shape[0])
        node = graph.size(length, [x])
    assert node.target is aten.sym_size.int
    assert node.args == (graph.leaf(x), 0)
    assert fake.size(sympy.Integer(7), []) == 7
    assert str(fake.size(length, [x])) == str(length)


def test_a_size_is_a_part_or_a_multiple_of_one_that_a_tensor_has() -> None:
    graph, fake, x, out = _builders()
    length = fake.leaf(x).shape[0]
    symbol = axes.size_expr(length)
    with graph.at(out, with_grad=False):
        node = graph.size(6 * symbol, [x])
    assert (node.target, node.args[1]) == (operator.mul, 6)
    assert str(fake.size(6 * symbol, [x])) == str(6 * length)
    wide = mock.Mock(shape=(6 * length,))
    with mock.patch.object(emit, "example", return_value=wide):
        assert str(fake.size(symbol, [x])) == str(length)
        seen = emit.find_size(None, fake._mode, 4 * symbol, [x])  # type: ignore[arg-type]
    assert (seen.times, seen.by) == (2, 3)


def test_a_size_that_was_fixed_after_it_was_read_is_a_number() -> None:
    _, fake, x, _ = _builders()
    length = fake.leaf(x).shape[0]
    before = axes.size_expr(length)
    bool(length == int(length.node.hint))
    assert fake.size(before, [x]) == length.node.hint


def test_a_symbolic_size_that_no_tensor_has_is_refused() -> None:
    _, fake, x, _ = _builders()
    with pytest.raises(AxisError, match="no tensor of the site has the size"):
        fake.size(sympy.Symbol("s99"), [x])


def test_what_is_shared_is_made_once_in_each_grad_mode() -> None:
    graph, _, x, out = _builders(grad=True)
    nodes = []
    for with_grad in (True, True, False):
        with graph.at(out, with_grad=with_grad):
            nodes.append(graph.once("key", lambda: graph.call(torch.mul, graph.leaf(x), 2)))
    assert nodes[0] is nodes[1]
    assert nodes[0] is not nodes[2]


def test_shared_mask_is_additive_and_made_once() -> None:
    gm, mirror = captured(lambda x, allowed: torch.where(allowed, x, 0.0).cos(), torch.ones(3), torch.ones(3) > 0)
    mode = fake_mode_of_values(n.meta.get("example_value") for n in gm.graph.nodes)
    assert mode is not None
    builder = GraphBuilder(gm.graph, mirror, mode)
    (out,) = (n for n in mirror.graph.nodes if n.target is aten.cos.default)
    (allowed,) = (n for n in mirror.graph.nodes if n.op == "placeholder" and n.meta["val"].dtype == torch.bool)
    with builder.at(out, with_grad=False):
        first = builder.shared_mask(builder.leaf(allowed), torch.bfloat16)
        second = builder.shared_mask(builder.leaf(allowed), torch.bfloat16)
        other = builder.shared_mask(builder.leaf(allowed), torch.float32)
        same = builder.shared_mask(other, torch.float32)
    assert first is second
    assert builder.value(first).dtype == torch.bfloat16
    assert builder.value(other).dtype == torch.float32
    assert same is other


def test_a_value_inside_one_call_of_the_graph_is_no_leaf() -> None:
    layer = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    mirror = mirror_of(lambda x: layer(x, x, x, need_weights=False)[0], torch.randn(2, 3, 4))
    (inside,) = (n for n in mirror.graph.nodes if n.target is aten.scaled_dot_product_attention.default)
    with pytest.raises(AxisError, match="only inside one call"):
        emit.example(mirror, inside)


# ---- loads of tensors that are written to --------------------------------------------------------------------------


def _counted(x: Tensor, length: Tensor, *, before: int = 0, between: int = 1, after: int = 1) -> Tensor:
    """A length as a cache counts it up in place: it is read once, and a site stands further down."""
    for _ in range(before):
        length.add_(10)
    a = x * length
    for _ in range(between):
        length.add_(100)
    b = a.cos()
    for _ in range(after):
        length.add_(1000)
    return b + x


def _loading(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[fx.GraphModule, GraphBuilder, Version, fx.Node]:
    """(graph, builder, the length where `mul` reads it, the mirror node of `cos`)"""
    gm, mirror = captured(function, *inputs)
    mode = fake_mode_of_values(n.meta.get("example_value") for n in gm.graph.nodes)
    assert mode is not None
    nodes = {n.target: n for n in mirror.graph.nodes}
    read = nodes[aten.mul.Tensor]
    version = mutation.version(mirror, read.args[1], mirror.order(read))
    return gm, GraphBuilder(gm.graph, mirror, mode), version, nodes[aten.cos.default]


@pytest.mark.parametrize("between", [0, 1, 2])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_load_has_the_value_of_its_time(before: int, between: int) -> None:
    function = functools.partial(_counted, before=before, between=between)
    x, length = torch.ones(3), torch.tensor(1.0)
    gm, builder, version, site = _loading(function, x, length.clone())
    with builder.at(site, with_grad=False) as old:
        node = builder.loaded(version)
        again = builder.loaded(version)
        out = builder.call(torch.add, old.args[0], node)
    assert again is node
    old.replace_input_with(old.args[0], out)
    assert ("clone" in str(node.target)) == (between > 0)
    gm.recompile()
    gm.graph.lint()
    # Dynamo orders the inputs by their first use.
    inputs = [n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"]
    (got,) = gm(*(x if fake.dim() else length for fake in inputs))
    value = 1.0 + 10 * before
    torch.testing.assert_close(got, (x * value + value).cos() + x)


def test_a_write_through_a_view_counts() -> None:
    def function(x: Tensor, lengths: Tensor) -> Tensor:
        length = lengths[0]
        a = x * length
        lengths.add_(1)
        return a.cos()

    _, builder, version, site = _loading(function, torch.ones(3), torch.ones(2))
    with builder.at(site, with_grad=False):
        node = builder.loaded(version)
    assert "clone" in str(node.target)
    order = list(node.graph.nodes)
    assert order.index(node) < next(i for i, n in enumerate(order) if n.target == "add_")


def test_copies_carry_the_line_of_the_write() -> None:
    _, builder, version, site = _loading(_counted, torch.ones(3), torch.tensor(1.0))
    with builder.at(site, with_grad=False) as old:
        node = builder.loaded(version)
        below = builder.call(torch.neg, node)
    assert node.meta["stack_trace"] == node.next.meta["stack_trace"] != old.meta["stack_trace"]
    assert below.meta["stack_trace"] == old.meta["stack_trace"]


def test_loads_that_can_not_be_had_are_refused() -> None:
    _, builder, version, site = _loading(_counted, torch.ones(3), torch.tensor(1.0))
    with pytest.raises(ValueError, match="outside of `at`"):
        builder.loaded(version)
    with builder.at(site, with_grad=False):
        with pytest.raises(AxisError, match="not read before"):
            builder.loaded(Version(node=version.node, since=_last_write(site)))
        foreign = next(n for n in mirror_of(_counted, torch.ones(3), torch.tensor(1.0)).graph.nodes)
        with pytest.raises(AxisError, match="graph that calls this body"):
            builder.loaded(Version(node=foreign))


def _last_write(site: fx.Node) -> fx.Node:
    return [n for n in site.graph.nodes if n.target is aten.add_.Tensor][-1]


def test_a_copy_that_would_need_a_gradient_is_refused() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        scale = weight.sin()
        a = x * scale
        scale.add_(1)
        return a.cos()

    _, builder, version, site = _loading(function, torch.ones(3), torch.ones((), requires_grad=True))
    with builder.at(site, with_grad=True), pytest.raises(AxisError, match="wants a gradient"):
        builder.loaded(version)


def test_what_nothing_reads_is_erased() -> None:
    graph, _, x, out = _builders()
    with graph.at(out, with_grad=False) as old:
        read, unread, output = (graph.call(torch.mul, graph.leaf(x), n) for n in range(2, 5))
        above = graph.call(torch.add, unread, 1)
    old.replace_all_uses_with(read)
    graph.erase_unused([output])
    left = list(old.graph.nodes)
    assert read in left
    assert output in left
    assert unread not in left
    assert above not in left


def test_the_target_is_the_site_s() -> None:
    graph, _, _, out = _builders()
    with graph.at(out, with_grad=False, target=Target.fake(sm=80)):
        assert graph.target.sm == 80
    with pytest.raises(ValueError, match="outside of a site"):
        _ = graph.target


@pytest.mark.parametrize("views", [lambda x: x.chunk(2, -1)[1], lambda x: x.unflatten(-1, (2, -1)).unbind(-2)[0]])
def test_views_of_a_base_that_is_written_later_are_copied(views: Callable[[Tensor], Tensor]) -> None:
    """Autograd refuses any use of such a view's fake value after the write."""

    def attention(base: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        # With a bias that wants a gradient, eager saves a scaled q, which the write does not reach.
        out = torch.nn.functional.scaled_dot_product_attention(views(base), k, v, attn_mask=bias)
        base.add_(1.0)
        return out

    given = [torch.randn(2, 1, 3, n, requires_grad=True) for n in (8, 4, 4, 3)]
    options = {"strict": True, "inner": "aot_eager", "lowerings": ["math"]}
    compiled = torch.compile(attention, backend="attn_compiler", fullgraph=True, options=options)

    def gradients(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        out = function(given[0].clone(), *given[1:])
        return out, *torch.autograd.grad(out.sin().sum(), given)

    for mine, right in zip(gradients(compiled), gradients(attention), strict=True):
        torch.testing.assert_close(mine, right)
    (site,) = attn_compiler.reports()[-1].sites
    assert site.decision.lowering != "untouched"
