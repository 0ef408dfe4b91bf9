"""Rules for ops that commute with sharding: all operands are sharded alike, on no axis that the op reduces or compares along.

The op on DTensors then equals the op on their local tensors. With other placements PyTorch communicates in between; these rewrites do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph import bodies
from attn_compiler.passes.graph.calls import argument, target_name
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.torch_private import compat as torch_compat, dtensors as torch_dtensors, symbols as torch_symbols
from attn_compiler.torch_private.dtensors import RULE, Shards

SDPA = "scaled_dot_product_attention"
SOFTMAXES = frozenset({"softmax", "_softmax"})
PRODUCTS = frozenset({"matmul", "bmm", "__matmul__"})
POINTWISE = frozenset(
    "add sub mul truediv div true_divide neg tanh where masked_fill float double half bfloat16 to type clone contiguous dropout".split()
)

_OPERANDS = ("query", "key", "value")


def read(node: fx.Node, name: str) -> Shards | Reason:
    """Return the placement of a node's DTensor. name: for people."""
    return torch_dtensors.shards(node.meta["example_value"], name)


def refused(node: fx.Node, out: Shards) -> Reason | None:
    """Return why a call on DTensors differs from the call on their local tensors; None if it does not. out: placement of its result."""
    name = target_name(node)
    if name == SDPA:
        return _of_sdpa(node, out)
    if bodies.writes(node):
        return Reason(code=Code.NO_LOCAL_ATTENTION, rule=RULE, observed=f"{node.name} writes to what it is given")
    value: torch.Tensor = node.meta["example_value"]
    if name in PRODUCTS and any(dim >= value.dim() - 2 for dim in out.cut):
        return Reason(
            code=Code.SHARDED_SEQUENCE, rule=RULE, observed=f"{node.name} is sharded along a sequence", remedy=_SEQUENCE
        )
    if name in SOFTMAXES:
        dim = argument(node, 1, "dim")
        if not isinstance(dim, int) or dim % value.dim() in out.cut:
            return Reason(
                code=Code.SHARDED_SEQUENCE,
                rule=RULE,
                observed=f"{node.name} runs along an axis that is sharded",
                remedy=_SEQUENCE,
            )
    if name == "dropout" and _drops(node):
        return _dropout(node.name)
    return next(_misfits(node, {x.name: x for x in node.all_input_nodes}, out), None)


_SEQUENCE = "shard q, k and v over heads or over the batch, or give options={'context_parallel': ...}"


def _of_sdpa(node: fx.Node, out: Shards) -> Reason | None:
    q, k, v = (argument(node, i, name) for i, name in enumerate(_OPERANDS))
    placed: dict[str, Shards] = {}
    for name, x in zip(_OPERANDS, (q, k, v), strict=True):
        if not isinstance(x, fx.Node) or not torch_dtensors.is_dtensor(x.meta.get("example_value")):
            return Reason(
                code=Code.PLACEMENTS, rule=RULE, observed=f"{name} is no DTensor, unlike others of q, k and v"
            )
        found = read(x, name)
        if isinstance(found, Reason):
            return found
        rank = x.meta["example_value"].dim()
        if any(dim >= rank - 2 for dim in found.cut):
            axis = "sequence" if rank - 2 in found.cut else "head dim"
            return Reason(
                code=Code.SHARDED_SEQUENCE,
                rule=RULE,
                observed=f"{name} is sharded along its {axis}, {found.words}",
                remedy=_SEQUENCE,
            )
        placed[name] = found
    if len({(x.dims, x.mesh) for x in (*placed.values(), out)}) > 1:
        words = ", ".join(f"{name} {x.words}" for name, x in placed.items())
        return Reason(
            code=Code.PLACEMENTS,
            rule=RULE,
            observed=f"placements that are not equal, or are of several meshes: {words}",
            remedy="redistribute q, k and v to the same placements before the attention",
        )
    if len({x.meta["example_value"].dim() for x in (q, k, v)}) > 1:
        return Reason(
            code=Code.NO_LOCAL_ATTENTION, rule=RULE, observed="q, k and v do not have the same number of axes"
        )
    if _is_on(argument(node, 4, "dropout_p")):
        return _dropout("dropout_p")
    mask = argument(node, 3, "attn_mask")
    return next(_misfits(node, {"attn_mask": mask} if isinstance(mask, fx.Node) else {}, out), None)


def _dropout(name: str) -> Reason:
    return Reason(
        code=Code.SHARDED_DROPOUT,
        rule=RULE,
        observed=f"{name} drops weights, and PyTorch draws random numbers for DTensors in a way of its own",
        remedy="leave out dropout, or call the attention on local tensors (x.to_local())",
    )


def _is_on(probability: object) -> bool:
    return probability is not None and probability != 0


def _drops(node: fx.Node) -> bool:
    share = argument(node, 1, "p")
    return argument(node, 2, "training") is not False and (share is None or _is_on(share))


def _misfits(node: fx.Node, given: dict[str, fx.Node], out: Shards) -> Iterator[Reason]:
    """Yield reasons against given tensors that are not sharded as the result is, and can't be without communication."""
    result: torch.Tensor = node.meta["example_value"]
    for name, x in given.items():
        value = x.meta.get("example_value")
        if not isinstance(value, torch.Tensor):
            continue
        placed = _placed(x, value, name, out)
        if isinstance(placed, Reason):
            yield placed
        elif not _fits(value, placed, out, result):
            yield Reason(
                code=Code.PLACEMENTS,
                rule=RULE,
                observed=f"{name} is {placed.words}, and the attention {out.words}",
                remedy=f"redistribute {name} as q is, or give it one element along what is sharded",
            )
        elif value.requires_grad and not torch_dtensors.is_dtensor(value) and out.cut:
            yield Reason(
                code=Code.PLACEMENTS,
                rule=RULE,
                observed=f"{name} is no DTensor, and has a gradient of all processes' shares",
            )


def _placed(x: fx.Node, value: torch.Tensor, name: str, out: Shards) -> Shards | Reason:
    if not torch_dtensors.is_dtensor(value):
        if torch_compat.is_wrapper_subclass(value):
            return Reason(code=Code.NO_LOCAL_ATTENTION, rule=RULE, observed=f"{name} is a {type(value).__name__}")
        return Shards(mesh=out.mesh, dims=(None,) * len(out.dims), words="no DTensor")
    found = read(x, name)
    if isinstance(found, Shards) and found.mesh != out.mesh:
        return Reason(code=Code.PLACEMENTS, rule=RULE, observed=f"{name} is on another mesh than the attention")
    return found


def _fits(value: torch.Tensor, own: Shards, out: Shards, result: torch.Tensor) -> bool:
    for dim, wanted in zip(own.dims, out.dims, strict=True):
        if dim != _axis(wanted, value, result.dim()) and not (dim is None and _is_one(value, wanted, result.dim())):
            return _is_whole(value, own, out, result)
    return True


def _is_whole(value: torch.Tensor, own: Shards, out: Shards, result: torch.Tensor) -> bool:
    """Return whether every process can cut its share out of its own data. False with a gradient, which would need a gather."""
    if value.requires_grad or own.cut or not torch_dtensors.is_dtensor(value):
        return False
    axes = [(_axis(wanted, value, result.dim()), wanted) for wanted in out.dims]
    return all(
        axis is None or axis < 0 or torch_symbols.statically_known(value.shape[axis] == result.shape[wanted])
        for axis, wanted in axes
        if wanted is not None
    )


def _axis(wanted: int | None, value: torch.Tensor, rank: int) -> int | None:
    """Return a tensor's axis for an axis of a result with `rank` axes, aligned from the right. Below zero: it has none."""
    return None if wanted is None else wanted - (rank - value.dim())


def _is_one(value: torch.Tensor, wanted: int | None, rank: int) -> bool:
    """Return whether a tensor has size one along an axis of the result, or lacks that axis."""
    axis = _axis(wanted, value, rank)
    return axis is not None and (axis < 0 or torch_symbols.statically_known(value.shape[axis] == 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenShare:
    """A process's share of a DTensor that is given to attention.

    sums: mesh axes along which each process uses the tensor for its own share of the result.
    dims: the axis to cut first, for each mesh axis; None: the sharding is right already.
    """

    sums: tuple[int, ...]
    dims: tuple[int | None, ...] | None


def taken(value: Any, out: Shards, rank: int) -> GivenShare:
    """Return the share to take of a DTensor. out: sharding of the result that uses it. rank: number of axes of the result."""
    own = torch_dtensors.shards(value, "a tensor")
    if not isinstance(own, Shards):
        raise ValueError(str(own))
    wanted = [None if _is_one(value, dim, rank) else _axis(dim, value, rank) for dim in out.dims]
    sums = tuple(i for i, dim in enumerate(out.dims) if dim is not None and wanted[i] is None)
    return GivenShare(sums=sums, dims=None if tuple(wanted) == own.dims else tuple(wanted))


def no_product(softmax: fx.Node) -> Reason:
    return Reason(
        code=Code.NO_LOCAL_ATTENTION,
        rule="a softmax is between the product with k and the product with v",
        observed=f"{softmax.name} of a DTensor is not",
    )


def moved(node: fx.Node, own: Shards, out: Shards) -> Reason:
    """Return the reason that leaves a node next to a softmax outside the attention."""
    return Reason(
        code=Code.PLACEMENTS,
        rule=RULE,
        observed=f"{node.name} is {own.words}, and the softmax {out.words}",
        remedy="redistribute q, k and v to the same placements before the attention",
    )


def differs(node: fx.Node, value: Any, wanted: Any) -> Reason | None:
    """Compare a result of local tensors with the model's own: dtype, device, rank and shape must agree."""
    same = value.dtype == wanted.dtype and value.device == wanted.device and value.dim() == wanted.dim()
    if same and all(torch_symbols.statically_known(x == y) for x, y in zip(value.shape, wanted.shape, strict=True)):
        return None
    observed = (
        f"{node.name} is {value.dtype} {tuple(value.shape)} of these, and {wanted.dtype} {tuple(wanted.shape)} of those"
    )
    return Reason(code=Code.NO_LOCAL_ATTENTION, rule=RULE, observed=observed)


def no_match(node: fx.Node) -> Reason:
    return Reason(
        code=Code.PLACEMENTS, rule=RULE, observed=f"nothing that is given to the attention is placed as {node.name} is"
    )
