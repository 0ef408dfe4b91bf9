"""From the tensor that a model uses to the one that a kernel reads, and the factor that was left out on the way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from attn_compiler.passes.graph import axes, views
from attn_compiler.passes.graph.axes import AxisError, Dims
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Operand
from attn_compiler.passes.matching import operands
from tests.passes.compiling import mirror_of

aten = torch.ops.aten
SHAPE = (2, 3, 4, 8)


def _read(function: Callable[[Tensor], Tensor], *, through_scales: bool = True) -> tuple[Operand, float, Mirror]:
    """The operand behind function(x), which an op reads that stands for the attention."""
    mirror = mirror_of(lambda x: function(x).sin(), torch.randn(SHAPE))
    (sin,) = (n for n in mirror.graph.nodes if n.target is aten.sin.default)
    node = sin.args[0]
    dims = axes.fresh(axes.shape_exprs(views.value(node)))
    operand, factor = operands.read(mirror, node, dims, used=sin, until=sin, through_scales=through_scales)
    return operand, factor, mirror


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(2, 6, 4, 8),
        lambda x: x.repeat_interleave(2, dim=1),
        lambda x: x.repeat(1, 2, 1, 1),
        lambda x: x.contiguous(),
        lambda x: x.clone(),
        lambda x: x * 0.5,
        lambda x: (x / 2).repeat_interleave(2, 1) * 3,
        lambda x: x.unsqueeze(2).expand(2, 3, 5, 4, 8),
    ],
)
def test_read_from_above_what_copies_repeats_or_scales(function: Callable[[Tensor], Tensor]) -> None:
    assert _read(function)[0].root.op == "placeholder"


def test_free_views_are_kept_as_the_model_wrote_them() -> None:
    operand, factor, _ = _read(lambda x: x.transpose(1, 2))
    assert operand.root.target is aten.transpose.int
    assert factor == 1.0


@pytest.mark.parametrize(
    ("function", "factor"),
    [
        (lambda x: x * 0.5, 0.5),
        (lambda x: (x / 4).transpose(1, 2) * 2, 0.5),
        (lambda x: torch.tensor(0.25) * x, 0.25),
        (lambda x: x.repeat_interleave(2, 1), 1.0),
    ],
)
def test_constant_factors_are_multiplied_up(function: Callable[[Tensor], Tensor], factor: float) -> None:
    assert _read(function)[1] == pytest.approx(factor)


def test_scales_are_left_in_place_where_they_are_not_wanted() -> None:
    operand, factor, _ = _read(lambda x: x * 0.5, through_scales=False)
    assert operand.root.target is aten.mul.Tensor
    assert factor == 1.0


@pytest.mark.parametrize(
    ("function", "target"),
    [
        (lambda x: (x * x).clone(), aten.mul.Tensor),
        (lambda x: (x + 1).clone(), aten.add.Tensor),
        (lambda x: (x.double() * 0.5).clone(), aten.mul.Tensor),
        (lambda x: (x[0] * torch.ones(2, 1, 1, 1)).clone(), aten.mul.Tensor),
        (lambda x: (x * x.sum()).clone(), aten.mul.Tensor),
    ],
    ids=["square", "sum", "cast", "broadcast", "run-time factor"],
)
def test_what_is_more_than_moving_and_scaling_is_where_it_stops(
    function: Callable[[Tensor], Tensor], target: object
) -> None:
    root = _read(function)[0].root
    assert root.target is target or root.target in (aten._to_copy.default, aten.to.dtype)


def test_a_scale_that_changes_the_dtype_stays() -> None:
    operand, factor, _ = _read(lambda x: x.to(torch.float64) * 0.5)
    assert views.value(operand.root).dtype == torch.float64
    assert factor == 0.5


def test_varies_along_says_which_axes_are_read() -> None:
    operand, _, _ = _read(lambda x: x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(2, 6, 4, 8))
    varies = [[operand.varies_along(atom) for atom in axes.resolve(dim)] for dim in operand.dims]
    assert varies == [[True], [True, False], [True], [True]]


def test_unit_dimensions_carry_no_axis() -> None:
    operand, _, _ = _read(lambda x: x[:1].expand(2, -1, -1, -1))
    assert not operand.varies_along(axes.resolve(operand.dims[0])[0])


# ---- alignment with the scores ------------------------------------------------------------------------------------


def _dims(*sizes: int) -> Dims:
    return axes.fresh(axes.shape_exprs(torch.empty(sizes, device="meta")))


def _node(*shape: int) -> fx.Node:
    node = fx.Graph().placeholder("x")
    node.meta["val"] = torch.empty(shape, device="meta")
    return node


def test_broadcast_dims_are_aligned_from_the_right() -> None:
    scores = _dims(2, 4, 5, 6)
    assert operands.broadcast_dims(_node(5, 6), scores) == scores[2:]
    assert operands.broadcast_dims(_node(2, 1, 1, 6), scores) == (scores[0], (), (), scores[3])


def test_a_mask_of_a_higher_rank_than_the_scores_is_refused() -> None:
    with pytest.raises(AxisError, match="more dimensions"):
        operands.broadcast_dims(_node(1, 1, 5, 6), _dims(4, 5, 6))


def test_dims_by_label_broadcast_unit_dimensions() -> None:
    meaning = dict(enumerate(_dims(2, 4, 5)))
    assert operands.dims_by_label((0, 1, 2), meaning, _node(2, 1, 5)) == (meaning[0], (), meaning[2])
    assert operands.dims_by_label((2, 0), meaning, _node(5, 2)) == (meaning[2], meaning[0])


@pytest.mark.parametrize(
    ("function", "factor"),
    [(lambda x: x * 2, 2.0), (lambda x: x / 2, 0.5), (lambda x: 2 * x, 2.0), (lambda x: x.div_(2), 0.5)],
)
def test_scale_of(function: Callable[[Tensor], Tensor], factor: float) -> None:
    mirror = mirror_of(lambda x: function(x.sin()), torch.randn(SHAPE))
    (sin,) = (n for n in mirror.graph.nodes if n.target is aten.sin.default)
    (user,) = sin.users
    assert operands.scale_of(mirror, user) == (sin, factor)


@pytest.mark.parametrize(
    "function", [lambda x: x * 0, lambda x: 2 / x, lambda x: x + 2, lambda x: x * x], ids=["0", "2/x", "+", "x*x"]
)
def test_no_scale_of_the_tensor(function: Callable[[Tensor], Tensor]) -> None:
    mirror = mirror_of(lambda x: function(x.sin()), torch.randn(SHAPE))
    (sin,) = (n for n in mirror.graph.nodes if n.target is aten.sin.default)
    found = [operands.scale_of(mirror, user) for user in sin.users]
    assert [scale for scale in found if scale is not None and scale[0] is sin] == []
