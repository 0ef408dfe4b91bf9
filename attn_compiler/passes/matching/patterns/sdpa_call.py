"""`F.scaled_dot_product_attention` with any arguments: one ATen op in the mirror, with its semantics in its schema."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph import axes, constants, views
from attn_compiler.passes.graph.axes import Atom, AxisError, Dim, Dims
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Factor, Match, Refused, SiteScores, Term
from attn_compiler.passes.matching import operands
from attn_compiler.passes.matching.patterns import assembly
from attn_compiler.reasons.codes import Code

NAME = "sdpa call"
ANCHORS = frozenset({torch.ops.aten.scaled_dot_product_attention.default})


@dataclass(frozen=True, kw_only=True)
class SdpaCall:
    """One op's spelling of an SDPA call.

    pattern: name of the match's pattern.
    anchor: the call.
    out: the attention's output.
    mask: the schema's name of the mask.
    gqa: k and v may have fewer heads than q.
    """

    pattern: str
    anchor: fx.Node
    out: fx.Node
    mask: str
    gqa: bool


def match(mirror: Mirror, anchor: fx.Node) -> Match:
    """Match a call. Raises Refused for operands that are not (..., S, D) tensors, and for an unknown scale."""
    gqa = bool(views.argument(anchor, "enable_gqa"))
    return match_call(mirror, SdpaCall(pattern=NAME, anchor=anchor, out=anchor, mask="attn_mask", gqa=gqa))


def match_call(mirror: Mirror, call: SdpaCall) -> Match:
    """Match any op with such arguments, as `match` does."""
    q, k, v = (_tensor(call.anchor, name) for name in ("query", "key", "value"))
    try:
        return _match(mirror, call, q, k, v)
    except AxisError as error:
        raise Refused(
            Code.AXES, "every axis of q, k, v and the mask is known", str(error), at=call.anchor, progress=2
        ) from error


def _tensor(anchor: fx.Node, name: str) -> fx.Node:
    node = views.argument(anchor, name)
    if not isinstance(node, fx.Node) or views.value(node).dim() < 2:
        rule = "q, k and v have at least 2 dimensions"
        observed = f"{name} has {views.value(node).dim()}" if isinstance(node, fx.Node) else f"{name} is {node}"
        raise Refused(Code.ARGUMENTS, rule, observed, at=anchor, progress=0)
    return node


def _match(mirror: Mirror, call: SdpaCall, q: fx.Node, k: fx.Node, v: fx.Node) -> Match:
    anchor, gqa = call.anchor, call.gqa
    _unify_sizes(call, q, k, v)
    sizes = axes.shape_exprs(views.value(call.out))
    batch = axes.fresh(sizes[:-2])
    query, key = Atom(sizes[-2]), Atom(axes.shape_exprs(views.value(k))[-2])
    d_qk, d_v = Atom(axes.shape_exprs(views.value(q))[-1]), Atom(sizes[-1])
    q_dims: Dims = (*_batch_dims(q, batch), (query,), (d_qk,))
    k_dims: Dims = (*_batch_dims(k, batch, gqa=gqa), (key,), (d_qk,))
    v_dims: Dims = (*_batch_dims(v, batch, gqa=gqa), (key,), (d_v,))
    scale, factors = _scale(mirror, anchor, d_qk)
    q_op, q_factor = operands.read(mirror, q, q_dims, used=anchor, until=anchor, through_scales=True)
    k_op, k_factor = operands.read(mirror, k, k_dims, used=anchor, until=anchor, through_scales=True)
    v_op, _ = operands.read(mirror, v, v_dims, used=anchor, until=anchor)
    mask = _mask(mirror, call, (*batch, (query,), (key,)))
    boolean = mask is not None and views.value(mask.operand.node).dtype == torch.bool
    return assembly.assemble(
        pattern=call.pattern,
        anchor=anchor,
        first=call.out,
        out=call.out,
        out_dims=(*batch, (query,), (d_v,)),
        q=q_op,
        k=k_op,
        v=v_op,
        batch_dims=batch,
        query=(query,),
        key=(key,),
        head_dim_qk=(d_qk,),
        head_dim_v=(d_v,),
        scores=SiteScores(
            scale=scale * q_factor * k_factor,
            factors=factors,
            is_causal=bool(views.argument(anchor, "is_causal")),
            additive=(mask,) if mask is not None and not boolean else (),
            allowed=(mask,) if mask is not None and boolean else (),
            dropout_p=float(_number(views.argument(anchor, "dropout_p", 0.0), anchor)),
        ),
        covered=frozenset({anchor, call.out}),
    )


def _unify_sizes(call: SdpaCall, q: fx.Node, k: fx.Node, v: fx.Node) -> None:
    """Make the sizes of the inputs equal. The call does not compare them at compile time, and no kernel may read past the shorter one."""
    out = views.value(call.out).shape
    of_q, of_k, of_v = (views.value(node).shape for node in (q, k, v))
    pairs = [(of_k[-2], of_v[-2]), (of_q[-1], of_k[-1])]
    for shape in (of_q, of_k, of_v):
        pairs += zip(reversed(shape[:-2]), reversed(out[:-2]), strict=False)
    mask = views.argument(call.anchor, call.mask)
    if isinstance(mask, fx.Node):
        pairs += zip(reversed(views.value(mask).shape), (of_k[-2], *reversed(out[:-1])), strict=False)
    for own, other in pairs:
        axes.unify(own, other)


def _batch_dims(node: fx.Node, batch: Dims, *, gqa: bool = False) -> Dims:
    """Return the site's batch axes of one operand. Unit axes broadcast; with enable_gqa, several query heads read one head."""
    sizes = axes.shape_exprs(views.value(node))[:-2]
    own = batch[len(batch) - len(sizes) :]
    dims: list[Dim] = []
    for position, (size, dim) in enumerate(zip(sizes, own, strict=True)):
        whole = axes.dim_size(dim)
        if gqa and position == len(sizes) - 1 and not axes.same_size(size, whole):
            dims.append(_kv_heads(dim, size))
        else:
            dims.append(() if size == axes.ONE and whole != axes.ONE else dim)
    return tuple(dims)


def _kv_heads(heads: Dim, size: axes.Size) -> Dim:
    quotient = axes.exact_quotient(axes.dim_size(heads), size)
    if quotient is None:
        raise AxisError(f"{axes.dim_size(heads)} query heads for {size} key heads")
    return axes.regroup((axes.resolve(heads),), (size, quotient))[0]


def _scale(mirror: Mirror, anchor: fx.Node, d_qk: Atom) -> tuple[float, tuple[Factor, ...]]:
    given = views.argument(anchor, "scale")
    if given is None:
        if not d_qk.size.is_Integer:
            rule = "the default scale needs a static head dim"
            observed = f"head dim {d_qk.size}"
            remedy = "pass scale= as a number, compile without dynamic=True, or call torch._dynamo.mark_static(q, -1)"
            raise Refused(Code.ARGUMENTS, rule, observed, at=anchor, progress=1, remedy=remedy)
        return 1.0 / math.sqrt(int(d_qk.size)), ()
    known = constants.number(mirror, given)
    if known is not None:
        return known, ()
    if isinstance(given, fx.Node) and mirror.dynamo_node(given) is not None:
        return 1.0, (Factor(node=given),)
    raise Refused(Code.ARGUMENTS, "scale is a number of the graph", f"scale {given}", at=anchor, progress=1)


def _number(given: Any, anchor: fx.Node) -> float:
    if isinstance(given, (int, float)):
        return given
    raise Refused(Code.ARGUMENTS, "dropout_p is known while compiling", f"dropout_p {given}", at=anchor, progress=1)


def _mask(mirror: Mirror, call: SdpaCall, score_dims: Dims) -> Term | None:
    mask = views.argument(call.anchor, call.mask)
    if not isinstance(mask, fx.Node):
        return None
    dims = operands.broadcast_dims(mask, score_dims)
    operand, _ = operands.read(mirror, mask, dims, used=call.anchor, until=call.anchor)
    return Term(operand=operand)
