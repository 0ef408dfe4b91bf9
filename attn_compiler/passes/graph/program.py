"""The tensors that a kernel reads for a site, as calls on a Builder: run once on fake values for the spec, once into the graph."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import fx

from attn_compiler.passes.graph import axes, mutation
from attn_compiler.passes.graph.arrange import Recipe, arrange, simplified
from attn_compiler.passes.graph.axes import Dim
from attn_compiler.passes.graph.emit import Builder
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.passes.graph.site import Latent, Match, Operand, Projection, Term
from attn_compiler.torch_private import symbols as torch_symbols

X = TypeVar("X")


@dataclass(frozen=True, kw_only=True)
class StoredTensors(Generic[X]):
    """k and v in logical BHSD, in an FP8 cache's dtype; k_scale, v_scale: (), float32."""

    k: X
    v: X
    k_scale: X | None
    v_scale: X | None


@dataclass(frozen=True, kw_only=True)
class LatentTensors(Generic[X]):
    """latent: (B, 1, Skv, rank). rope: (B, 1, Skv, p). weight_k, weight_v: (H, each's dims, rank)."""

    latent: X
    rope: X | None
    weight_k: X
    weight_v: X


@dataclass(frozen=True, kw_only=True)
class Tensors(Generic[X]):
    """q, k, v in logical BHSD and in the dtypes that the site computes in; mask broadcasts to (B, Hq, Sq, Skv)."""

    q: X
    k: X
    v: X
    mask: X | None
    sinks: X | None
    stored: StoredTensors[X] | None = None
    latent: LatentTensors[X] | None = None


def build(mirror: Mirror, match: Match, builder: Builder[X], dtype: torch.dtype) -> Tensors[X]:
    """Make the operands of a site. Raises AxisError where an axis has no provable place.

    dtype: of the product q kᵀ. The product with v may run in a wider one, which v then keeps: lowerings refuse two dtypes.
    """
    dtype_v = torch.promote_types(dtype, match.out.meta["val"].dtype)
    site, of_keys = match.axes, (match.axes.batch, match.axes.heads_kv, match.axes.key)
    of_q = (site.batch, site.heads, site.query, site.head_dim_qk)
    q = _operand(mirror, match, builder, "q", match.q, of_q, dtype)
    k = _operand(mirror, match, builder, "k", match.k, (*of_keys, site.head_dim_qk), dtype)
    v = _operand(mirror, match, builder, "v", match.v, (*of_keys, site.head_dim_v), dtype_v)
    return Tensors(
        # A factor with a gradient saves q, so it multiplies the copy of q, if there is one.
        q=_factored(match, builder, q),
        k=k,
        v=v,
        mask=_mask(mirror, match, builder, dtype),
        sinks=_sinks(mirror, match, builder),
        stored=_stored(match, builder),
        latent=_latent(match, builder),
    )


def restore(match: Match, builder: Builder[X], out: X) -> X:
    """Bring the kernel's output (B, Hq, Sq, Dv) to the dimensions that the model expects."""
    kernel_dims = (match.axes.batch, match.axes.heads, match.axes.query, match.axes.head_dim_v)
    atoms = {a: a for a in axes.flat(kernel_dims)}
    recipe = simplified(arrange(kernel_dims, atoms, match.out_dims, broadcast=False))
    return _run(match, builder, recipe, out)


def restore_lse(match: Match, builder: Builder[X], lse: X) -> X:
    """Bring the kernel's logsumexp (B, Hq, Sq) to the dimensions that the model expects."""
    kernel_dims = (match.axes.batch, match.axes.heads, match.axes.query)
    atoms = {a: a for a in axes.flat(kernel_dims)}
    if match.lse is None:
        raise ValueError("nothing reads the logsumexp of the site")
    recipe = simplified(arrange(kernel_dims, atoms, match.lse.dims, broadcast=False))
    return _run(match, builder, recipe, lse)


def _run(match: Match, builder: Builder[X], recipe: Recipe, x: X) -> X:
    known = [match.q.root, match.k.root, match.v.root]
    known += [t.operand.root for t in match.scores.terms]
    result: X = recipe.run(x, builder.call, lambda size: builder.size(size, known))
    return result


def _arranged(match: Match, builder: Builder[X], operand: Operand, target: tuple[Dim, ...], source: X) -> X:
    """Bring an operand to the target's dimensions. source: the operand's root, or a copy of it."""
    recipe = simplified(arrange(operand.root_dims, operand.reads, target, broadcast=False))
    return _run(match, builder, recipe, source)


def is_arranged(operand: Operand, target: tuple[Dim, ...]) -> bool:
    """Return whether the operand's root has the target's dimensions without any view. Raises AxisError as `build`."""
    return not simplified(arrange(operand.root_dims, operand.reads, target, broadcast=False)).views


def _operand(
    mirror: Mirror,
    match: Match,
    builder: Builder[X],
    name: str,
    operand: Operand,
    target: tuple[Dim, ...],
    dtype: torch.dtype | None,
) -> X:
    """Make q, k, v or the sinks. An operand that has to be kept is copied, unless its cast or its arrangement made a copy already."""
    root = builder.leaf(operand.root)
    x = cast(builder, _arranged(match, builder, operand, target, root), dtype)
    if operand.kept is None or not _shares_memory(builder, operand, x):
        return x
    # The root is copied: it is smaller where the kernel reads one element several times.
    held = builder.hold(root, _version(mirror, match, operand), operand=name, why=operand.kept)
    return _arranged(match, builder, operand, target, held)


def _shares_memory(builder: Builder[X], operand: Operand, x: X) -> bool:
    root = builder.value(builder.leaf(operand.root))
    return bool(mutation.storages_of(builder.value(x)) & mutation.storages_of(root))


def _version(mirror: Mirror, match: Match, operand: Operand) -> Version:
    return mutation.version(mirror, operand.root, mirror.order(match.out))


def cast(builder: Builder[X], x: X, dtype: torch.dtype | None) -> X:
    """Convert x to a dtype; None leaves it as it is."""
    return x if dtype is None or builder.value(x).dtype == dtype else builder.call(torch.Tensor.to, x, dtype)


def _factored(match: Match, builder: Builder[X], q: X) -> X:
    """Multiply scales that are known at run time only on q, in its own dtype."""
    dtype = builder.value(q).dtype
    for factor in match.scores.factors:
        by = builder.leaf(factor.node) if factor.operand is None else _over_queries(match, builder, factor.operand)
        q = builder.call(operator.truediv if factor.divide else operator.mul, q, by)
    return cast(builder, q, dtype)


def _over_queries(match: Match, builder: Builder[X], operand: Operand) -> X:
    """Arrange a tensor so that it broadcasts to (B, Hq, Sq, 1): a site's factor does not depend on the key."""
    target = (match.axes.batch, match.axes.heads, match.axes.query, ())
    recipe = simplified(arrange(operand.root_dims, operand.reads, target, broadcast=True))
    return _run(match, builder, recipe, builder.leaf(operand.root))


def _mask(mirror: Mirror, match: Match, builder: Builder[X], dtype: torch.dtype) -> X | None:
    """Combine all that is added or masked into one tensor, shared by all sites with the same terms."""
    terms = match.scores.terms
    if not terms:
        return None
    identity = (dtype, *_identity(mirror, match))
    mask = builder.once(identity, lambda: _combined(match, builder, dtype))
    # Several terms combine into a new tensor.
    why = next((t.operand.kept for t in terms if t.operand.kept and _shares_memory(builder, t.operand, mask)), None)
    return mask if why is None else builder.hold(mask, identity, operand="mask", why=why)


def _identity(mirror: Mirror, match: Match) -> tuple[object, ...]:
    return tuple(
        (adds, _version(mirror, match, t.operand), t.weight, t.weighed_in, t.inverted, t.along, _recipe(match, t).text)
        for adds, terms in ((True, match.scores.additive), (False, match.scores.allowed))
        for t in terms
    )


def _recipe(match: Match, term: Term) -> Recipe:
    target = (match.axes.batch, match.axes.heads, match.axes.query, match.axes.key)
    return simplified(arrange(term.operand.root_dims, term.operand.reads, target, broadcast=True))


def _over_pairs(match: Match, builder: Builder[X], term: Term) -> X:
    """Arrange the term's tensor so that it broadcasts to (B, Hq, Sq, Skv), with one element along axes where all are equal."""
    x = _run(match, builder, _recipe(match, term), builder.leaf(term.operand.root))
    for axis, letter in enumerate("bhqk"):
        if letter not in term.along and torch_symbols.statically_known(builder.value(x).shape[axis] > 1):
            x = builder.call(torch.narrow, x, axis, 0, 1)
    return x


def _combined(match: Match, builder: Builder[X], dtype: torch.dtype) -> X:
    total = keep = None
    for term in match.scores.additive:
        x = _over_pairs(match, builder, term)
        # An added truth value counts as 0 or 1, while a kernel would take it for a mask.
        x = x if builder.value(x).is_floating_point() else builder.call(torch.Tensor.to, x, dtype)
        x = _weighted(builder, x, term)
        total = x if total is None else builder.call(operator.add, total, x)
    for term in match.scores.allowed:
        c = _over_pairs(match, builder, term)
        c = builder.call(torch.ne, c, 0) if term.by_numbers else c
        c = builder.call(torch.logical_not, c) if term.inverted else c
        keep = c if keep is None else builder.call(torch.logical_and, keep, c)
    if total is not None and keep is not None:
        return builder.call(torch.where, keep, total, float("-inf"))
    combined = total if total is not None else keep
    if combined is None:
        raise ValueError("a mask was asked for where there is none")
    return combined


def _weighted(builder: Builder[X], x: X, term: Term) -> X:
    """Multiply the tensor by its weight, in the dtype that the model multiplies in: float16 has no number for -1 times 1e5."""
    if term.weight == 1.0:
        return x
    own = builder.value(x).dtype
    if term.weighed_in is not None and not _is_exact_in_every_dtype(term.weight):
        x = cast(builder, x, torch.promote_types(own, term.weighed_in))
    return builder.call(operator.mul, x, term.weight)


def _is_exact_in_every_dtype(weight: float) -> bool:
    """Return whether the product with any number keeps the number's digits, and is no larger: the weight is a power of two up to 1."""
    mantissa, _ = math.frexp(abs(weight))
    return mantissa == 0.5 and abs(weight) <= 1.0


def _sinks(mirror: Mirror, match: Match, builder: Builder[X]) -> X | None:
    """Make the sink logits, (Hq,), which vary along the heads only."""
    if match.scores.sinks is None:
        return None
    if isinstance(match.scores.sinks, float):
        heads = builder.size(axes.dim_size(match.axes.heads), [match.q.root])
        device = match.q.root.meta["val"].device
        return builder.call(torch.full, (heads,), match.scores.sinks, dtype=torch.float32, device=device)
    return _operand(mirror, match, builder, "sinks", match.scores.sinks, (match.axes.heads,), None)


def _stored(match: Match, builder: Builder[X]) -> StoredTensors[X] | None:
    if match.reads.stored is None:
        return None
    k, v = match.reads.stored
    of_both = (match.axes.batch, match.axes.heads_kv, match.axes.key)
    scales = (None if x.scale is None else cast(builder, builder.leaf(x.scale), torch.float32) for x in (k, v))
    return StoredTensors(
        k=_arranged(match, builder, k.operand, (*of_both, match.axes.head_dim_qk), builder.leaf(k.operand.root)),
        v=_arranged(match, builder, v.operand, (*of_both, match.axes.head_dim_v), builder.leaf(v.operand.root)),
        k_scale=next(scales),
        v_scale=next(scales),
    )


def _latent(match: Match, builder: Builder[X]) -> LatentTensors[X] | None:
    found = match.reads.latent
    if not isinstance(found, Latent):
        return None
    of_both = (match.axes.batch, (), match.axes.key)
    latent, rope = (
        None if x is None else _arranged(match, builder, x, (*of_both, last), builder.leaf(x.root))
        for x, last in ((found.latent, found.rank), (found.rope, found.rope_dim))
    )
    if latent is None:
        raise ValueError("a latent was asked for where there is none")
    return LatentTensors(latent=latent, rope=rope, weight_k=_rows(builder, found.k), weight_v=_rows(builder, found.v))


def _rows(builder: Builder[X], of: Projection) -> X:
    """Return the rows of a projection's weight, (H, rows of a head, rank)."""
    by_head = builder.call(torch.unflatten, builder.leaf(of.weight), 0, (of.heads, of.each))
    return builder.call(torch.narrow, by_head, 1, of.first, of.size)


def sources(match: Match) -> list[fx.Node]:
    """Return every mirror node that the kernel's operands are read from."""
    terms = [t.operand.root for t in match.scores.terms]
    sinks = [match.scores.sinks.root] if isinstance(match.scores.sinks, Operand) else []
    factors = [factor.operand.root for factor in match.scores.factors if factor.operand is not None]
    latent = match.reads.latent.sources if isinstance(match.reads.latent, Latent) else ()
    return [match.q.root, match.k.root, match.v.root, *terms, *sinks, *factors, *latent]
