"""Find the node that a kernel should read for a tensor of the model: above repeat_kv, copies and constant scales."""

from __future__ import annotations

import torch
from torch import fx

from attn_compiler.passes.graph import axes, constants, gradients, mutation, views
from attn_compiler.passes.graph.axes import Atom, AxisError, Dim, Dims
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Operand
from attn_compiler.spec.dtypes import HALVES

aten = torch.ops.aten

#: scaling ops -> True for a division
SCALES: dict[object, bool] = {
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar, aten.mul_.Tensor), False),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar, aten.div_.Tensor), True),
}


def scale_of(mirror: Mirror, node: fx.Node) -> tuple[fx.Node, float] | None:
    """Return (scaled tensor, factor) if the node multiplies or divides one tensor by a constant, else None."""
    if node.target not in SCALES:
        return None
    left, right = node.args[:2]
    divides = SCALES[node.target]
    factor = constants.number(mirror, right)
    if factor is not None and isinstance(left, fx.Node):
        return (left, 1.0 / factor if divides else factor) if factor else None
    factor = constants.number(mirror, left)
    if factor is not None and isinstance(right, fx.Node) and not divides:
        return (right, factor) if factor else None
    return None


def _climb(
    mirror: Mirror, node: fx.Node, *, through_scales: bool, through_upcasts: bool
) -> list[tuple[fx.Node, float]]:
    """Chain above `node` through views, constant scales and exact casts: (node, factor between it and `node`), nearest first."""
    chain = [(node, 1.0)]
    while True:
        current, factor = chain[-1]
        scaled = scale_of(mirror, current) if through_scales and not mutation.writes(current) else None
        if views.is_view(current):
            chain.append((views.source(current), factor))
        elif scaled is not None and _keeps_shape(current, scaled[0]):
            chain.append((scaled[0], factor * scaled[1]))
        elif through_upcasts and _is_upcast(current):
            chain.append((views.source(current), factor))
        else:
            return chain


def _is_upcast(node: fx.Node) -> bool:
    """Return whether it casts half precision to float32, which is exact."""
    if node.target not in views.CASTS or mutation.writes(node):
        return False
    before, after = views.value(views.source(node)), views.value(node)
    return before.dtype in HALVES and after.dtype == torch.float32


def _keeps_shape(node: fx.Node, source: fx.Node) -> bool:
    before, after = views.value(source), views.value(node)
    return axes.shape_exprs(before) == axes.shape_exprs(after) and before.dtype == after.dtype


def read(
    mirror: Mirror,
    node: fx.Node,
    site_dims: Dims,
    *,
    used: fx.Node,
    until: fx.Node,
    through_scales: bool = False,
    through_upcasts: bool = False,
) -> tuple[Operand, float]:
    """Return the operand behind `node`, whose dimensions mean `site_dims`, and the constant factor left out.

    The model reads `node` at `used`, and the kernel reads it at `until`, so nothing that aliases the root may be written in between. Raises
    AxisError if nothing above `node` exists in the Dynamo graph.
    """
    chain = _climb(mirror, node, through_scales=through_scales, through_upcasts=through_upcasts)
    # Positions in the chain to read from, best first: above the highest costly step, then lower ones.
    costly = [i + 1 for i, (n, _) in enumerate(chain[:-1]) if views.is_costly(n) or not views.is_view(n)]
    wanted = [_above_unit_axes(mirror, chain, i) for i in reversed(costly)] + [0, *range(1, len(chain))]
    candidates = [p for p in dict.fromkeys(wanted) if _is_readable(mirror, [n for n, _ in chain[: p + 1]], used, until)]
    error: AxisError | None = None
    for position in candidates:
        try:
            return _describe(chain, position, site_dims, used), chain[position][1]
        except AxisError as problem:
            error = problem
    raise error or AxisError(f"{node.name} is written in place, or exists only inside one call of the graph")


def _is_readable(mirror: Mirror, chain: list[fx.Node], used: fx.Node, until: fx.Node) -> bool:
    """Return whether the last of the chain, read at `until`, equals the first, used at `used`: same elements, same gradient."""
    root = chain[-1]
    if mirror.dynamo_node(root) is None:
        return False
    if gradients.carries(mirror, until) and gradients.stops_below(mirror, root, chain[:-1]):
        return False
    ends = [*reversed(chain[:-1]), used]
    rewritten = (
        mutation.written_between(mirror, n, n, end) for n, end in zip(reversed(chain[:-1]), ends[1:], strict=True)
    )
    return mutation.written_between(mirror, root, ends[0], until) is None and not any(rewritten)


def _above_unit_axes(mirror: Mirror, chain: list[tuple[fx.Node, float]], position: int) -> int:
    """Go further up past unsqueezes: they only prepared the omitted expand."""
    while (
        chain[position][0].target is aten.unsqueeze.default and mirror.dynamo_node(chain[position + 1][0]) is not None
    ):
        position += 1
    return position


def _describe(chain: list[tuple[fx.Node, float]], position: int, site_dims: Dims, used: fx.Node) -> Operand:
    root = chain[position][0]
    root_dims = axes.fresh(axes.shape_exprs(views.value(root)))
    dims = root_dims
    for node, _ in reversed(chain[:position]):
        dims = views.forward(node, dims) if views.is_view(node) else dims
    return Operand(
        node=chain[0][0], used=used, dims=site_dims, root=root, root_dims=root_dims, reads=pairs(dims, site_dims)
    )


def pairs(dims: Dims, site_dims: Dims) -> dict[Atom, Atom]:
    reads: dict[Atom, Atom] = {}
    for mine, theirs in zip(dims, site_dims, strict=True):
        if axes.is_unit(mine):
            continue
        reads.update((site, own) for own, site in axes.align(mine, theirs))
    return reads


def settle(operands: list[Operand]) -> None:
    """Pair all operands again until no atom of the site splits any more. Each operand then has the finest axes of all."""
    before = -1
    while before != (now := sum(len(axes.resolve(dim)) for operand in operands for dim in operand.dims)):
        before = now
        for operand in operands:
            operand.reads = _repaired(operand)


def _repaired(operand: Operand) -> dict[Atom, Atom]:
    reads: dict[Atom, Atom] = {}
    for site, own in operand.reads.items():
        reads.update((s, o) for o, s in axes.align((own,), (site,)))
    return reads


def dims_by_label(labels: tuple[int, ...], meaning: dict[int, Dim], node: fx.Node) -> Dims:
    """Return the site's atoms for each dimension of a contraction's operand. A unit dimension of a batch label broadcasts."""
    sizes = axes.shape_exprs(views.value(node))
    return tuple(
        () if size == axes.ONE and axes.dim_size(meaning[label]) != axes.ONE else meaning[label]
        for label, size in zip(labels, sizes, strict=True)
    )


def broadcast_dims(node: fx.Node, score_dims: Dims) -> Dims:
    """Return the site's atoms for each dimension of a tensor that broadcasts against the scores, aligned from the right."""
    sizes = axes.shape_exprs(views.value(node))
    if len(sizes) > len(score_dims):
        raise AxisError(f"{node.name} has more dimensions than the scores")
    own = score_dims[len(score_dims) - len(sizes) :]
    return tuple(
        () if size == axes.ONE and axes.dim_size(dim) != axes.ONE else dim for size, dim in zip(sizes, own, strict=True)
    )
