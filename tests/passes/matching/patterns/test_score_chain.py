"""What steps on the scores add up to, in the order in which they run."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import sympy
import torch
from torch import fx

from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.axes import AxisError
from attn_compiler.passes.matching import contraction
from attn_compiler.passes.matching.patterns import score_chain, steps
from attn_compiler.passes.matching.patterns.score_chain import Scores
from attn_compiler.passes.matching.patterns.steps import Step
from attn_compiler.spec.scores import Softcap, Unusual

SIZES = [sympy.Integer(n) for n in (2, 4, 5, 6)]
MASKED = -1e9
ops = torch.ops.aten


class _Graph:
    """Nodes that only have a name: following steps looks at nothing else."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        q, k = (self._node(name, shape) for name, shape in (("q", (2, 4, 5, 8)), ("k", (2, 4, 8, 6))))
        node = self.graph.call_function(ops.matmul.default, (q, k))
        node.meta["val"] = torch.empty(2, 4, 5, 6, device="meta")
        product = contraction.parse(node)
        assert product is not None
        self.product = product
        self.dims = axes.fresh(SIZES)

    def _node(self, name: str, shape: tuple[int, ...]) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, device="meta")
        return node

    def follow(self, *makes: Callable[..., Step]) -> Scores:
        source = self.product.node
        steps = [make(node=source, source=source) for make in makes]
        return score_chain.follow(self.product, steps, self.dims)


def scale(factor: float) -> Callable[..., Step]:
    return lambda **nodes: steps.Scale(**nodes, factor=factor)


def add(weight: float = 1.0) -> Callable[..., Step]:
    return lambda **nodes: steps.Add(**nodes, term=nodes["node"], weight=weight)


def keep(fill: float = MASKED) -> Callable[..., Step]:
    return lambda **nodes: steps.Keep(**nodes, condition=nodes["node"], inverted=True, fill=fill)


def by_tensor(**nodes: fx.Node) -> Step:
    return steps.RuntimeScale(**nodes, by=nodes["node"], divide=False)


def sinks(**nodes: fx.Node) -> Step:
    return steps.SinkColumn(**nodes, sinks=nodes["node"])


def offset(**nodes: fx.Node) -> Step:
    return steps.Offset(**nodes)


def clamp(**nodes: fx.Node) -> Step:
    return steps.Clamp(**nodes, low=MASKED)


def tanh(**nodes: fx.Node) -> Step:
    return steps.Change(**nodes, name="tanh", change=Softcap(cap=1.0))


def unusual(found: Scores) -> list[str]:
    return [change.what for change in found.changes if isinstance(change, Unusual)]


cast, shift = steps.Cast, functools.partial(steps.Shift, subtracted=fx.Graph().placeholder("largest"))


def test_scales_multiply_up() -> None:
    assert _Graph().follow(scale(0.5), cast, scale(0.25)).scale == 0.125


def test_a_later_scale_reaches_what_was_added_before() -> None:
    found = _Graph().follow(add(), scale(0.5), add(-1.0), scale(4.0))
    assert [term.weight for term in found.additive] == [2.0, -4.0]
    assert found.scale == 2.0


def test_softcap_is_the_scale_after_the_tanh() -> None:
    found = _Graph().follow(scale(0.25), scale(1 / 50), tanh, scale(50.0), add())
    assert found.scale == pytest.approx(0.25)
    assert found.changes == [Softcap(cap=50.0)]


def test_a_softcap_is_positive() -> None:
    """With both numbers negative it is the same function."""
    found = _Graph().follow(scale(-1 / 50), tanh, scale(-50.0))
    assert found.scale == pytest.approx(1.0)
    assert found.changes == [Softcap(cap=50.0)]


@pytest.mark.parametrize(
    ("steps", "what"),
    [
        ((add(), tanh), "tanh after"),
        ((keep(), tanh), "tanh after"),
        ((shift, tanh), "tanh after"),
        ((offset, tanh), "tanh after"),
        ((offset, sinks), "sink column beside"),
        ((offset, clamp), "a clamp of scores"),
        ((tanh, tanh), "tanh after"),
        ((tanh, by_tensor), "run-time scale after"),
        ((add(), by_tensor), "run-time scale after"),
        ((keep(), by_tensor), "run-time scale after"),
        ((shift, sinks), "sink column beside"),
        ((sinks, add()), "after the sink column"),
        ((sinks, scale(2.0)), "after the sink column"),
        ((sinks, tanh), "after the sink column"),
    ],
)
def test_an_order_that_no_kind_describes_is_named(steps: tuple[Callable[..., Step], ...], what: str) -> None:
    assert any(what in text for text in unusual(_Graph().follow(*steps)))


@pytest.mark.parametrize(
    "steps", [(sinks, cast), (sinks, shift), (sinks, offset), (by_tensor, add()), (scale(2.0), tanh)]
)
def test_usual_orders_are_not_unusual(steps: tuple[Callable[..., Step], ...]) -> None:
    assert unusual(_Graph().follow(*steps)) == []


def test_masked_scores_may_be_scaled_a_little_but_not_away() -> None:
    assert _Graph().follow(keep(), scale(0.125)).masked_at == [MASKED * 0.125]
    with pytest.raises(AxisError, match="masked by now"):
        _Graph().follow(keep(-65504.0), scale(1e-3))
    with pytest.raises(AxisError, match="masked by now"):
        _Graph().follow(keep(), scale(-1.0))


@pytest.mark.parametrize("step", [sinks, steps.View])
def test_scores_may_not_move_once_the_sink_column_is_there(step: Callable[..., Step]) -> None:
    with pytest.raises(AxisError, match="after the sink column joined"):
        _Graph().follow(sinks, step)


def test_addend_of_a_product_is_added_with_its_factor() -> None:
    graph = fx.Graph()
    nodes = []
    for name, shape in (("bias", (8, 5, 6)), ("q", (8, 5, 4)), ("k", (8, 4, 6))):
        node = graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, device="meta")
        nodes.append(node)
    node = graph.call_function(ops.baddbmm.default, tuple(nodes), {"beta": 0.5, "alpha": 2.0})
    node.meta["val"] = torch.empty((8, 5, 6), dtype=torch.bfloat16, device="meta")
    product = contraction.parse(node)
    assert product is not None
    found = score_chain.follow(product, [], axes.fresh([sympy.Integer(n) for n in (8, 5, 6)]))
    added = [(term.node, term.weight, term.weighed_in) for term in found.additive]
    assert added == [(nodes[0], 0.5, torch.bfloat16)]
    assert found.scale == 2.0


# ---- the axis of the softmax --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "position"), [(-1, 3), (3, 3), (-2, 2), (0, 0)])
def test_softmax_axis(dim: int, position: int) -> None:
    dims = axes.fresh(SIZES)
    assert score_chain.softmax_axis(dim, Scores(dims=dims)) == dims[position]


def test_the_maximum_has_to_be_that_of_the_softmax() -> None:
    dims = axes.fresh(SIZES)
    with pytest.raises(AxisError, match="along another axis"):
        score_chain.softmax_axis(-2, Scores(dims=dims, shifted_along=[dims[-1]]))


def test_sinks_have_to_lie_along_the_softmax() -> None:
    graph = _Graph()
    with pytest.raises(AxisError, match="sink column lies"):
        score_chain.softmax_axis(-2, Scores(dims=graph.dims, sinks=graph.product.node))
