"""Attention written out: a product, steps on the scores, a softmax over the keys, a product with v.

The softmax is the anchor. Upward, score_steps.py must read every op until a product of two tensors. Downward, weights_chain.py must know
every op until a product with v. The axes of both products and of the softmax are followed all the way and must fit. Inductor's own patterns
skip that and fuse softmax(dim=-2) wrongly (https://github.com/pytorch/pytorch/issues/195320).
"""

from __future__ import annotations

import contextlib
from dataclasses import fields, replace
from operator import attrgetter

import torch
from torch import fx

from attn_compiler.passes.graph import axes, constants, gradients, mutation, views
from attn_compiler.passes.graph.axes import Atom, AxisError, Dim, Dims
from attn_compiler.passes.graph.calls import reached
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Factor, Joining, Match, Operand, Refused, SiteScores, Term
from attn_compiler.passes.matching import contraction, operands
from attn_compiler.passes.matching.contraction import Contraction
from attn_compiler.passes.matching.patterns import (
    assembly,
    denominators,
    score_chain,
    score_steps,
    sinks,
    softmaxes,
    weights_chain,
)
from attn_compiler.passes.matching.patterns.score_chain import Joined, Scaled, Scores
from attn_compiler.passes.matching.patterns.score_steps import MASKED_BELOW, STILL_MASKED_BELOW, rounded
from attn_compiler.passes.matching.patterns.shares import ONE
from attn_compiler.passes.matching.patterns.sinks import Sunk
from attn_compiler.passes.matching.patterns.softmaxes import Softmax
from attn_compiler.passes.matching.patterns.steps import Step
from attn_compiler.reasons.codes import Code

aten = torch.ops.aten
NAME = "softmax chain"
ANCHORS = softmaxes.CALLS | softmaxes.WRITTEN_OUT
#: views that leave a tensor aligned with the scores from the right
_KEEP_ALIGNMENT = frozenset(
    (*views.EXPANDS, *views.COPIES, aten.slice.Tensor, aten.to.dtype, aten.to.device, aten.to.dtype_layout)
)
_LONGEST_PATH = 40
_JOINED = "nothing can be done: that reader changes the scores or joins them again, and Inductor compiles them"
_JOIN_KEYS = "join the keys and the values before the products, in place of the scores of each part"


def match(mirror: Mirror, anchor: fx.Node) -> Match:
    """Match a softmax. Raises Refused with the place where the graph stops looking like attention. Exponentials are tried in one way."""
    softmax = softmaxes.read(mirror, anchor)
    if softmax is None:
        rule, observed = "the softmax runs over one axis", f"it runs over {views.argument(anchor, 'dim')}"
        raise Refused(Code.SOFTMAX_AXIS, rule, observed, at=anchor, progress=0)
    product, steps = _to_product(mirror, softmax)
    try:
        with contextlib.suppress(AxisError) if softmax.is_divided else contextlib.nullcontext():
            found = _match(mirror, softmax, product, steps)
            logits = found.scores.sinks
            rows = (found.axes.batch, found.axes.query)
            # Kernels require sinks that are equal for the whole batch and all queries.
            if not isinstance(logits, Operand) or not any(map(logits.varies_along, axes.flat(rows))):
                return found
        return _match(mirror, softmax, product, steps, with_sinks=False)
    except AxisError as error:
        rule = "every axis and every step of the scores can be followed"
        code = Code.AXES if softmax.is_divided else Code.WRITTEN_BY_HAND
        raise Refused(code, rule, str(error), at=anchor, progress=4) from error


def _to_product(mirror: Mirror, softmax: Softmax) -> tuple[Contraction, list[Step]]:
    """Walk up from the softmax. Return the product and the steps after it, in execution order."""
    deepest: list[tuple[int, fx.Node]] = []
    found = _climb(mirror, softmax.scores, [], deepest, set())
    if found is not None:
        return found
    depth, stopped = max(deepest, key=lambda d: d[0])
    rule = "between the product q kᵀ and the softmax stand only scales, masks, biases, softcap, casts and views"
    observed = f"{stopped.target if stopped.op == 'call_function' else stopped.op} ({stopped.name})"
    remedy = _JOIN_KEYS if stopped.target in (aten.cat.default, aten.concat.default) else None
    raise Refused(Code.BEFORE_SOFTMAX, rule, observed, at=stopped, progress=1 + min(depth, 1), remedy=remedy)


def _climb(
    mirror: Mirror, node: fx.Node, taken: list[Step], deepest: list[tuple[int, fx.Node]], seen: set[fx.Node]
) -> tuple[Contraction, list[Step]] | None:
    """Search depth first. Nodes in `seen` failed and are not tried again: each merge of two paths would double the work."""
    product = contraction.parse(node)
    if product is not None:
        return product, taken[::-1]
    deepest.append((len(taken), node))
    seen.add(node)
    if len(taken) == _LONGEST_PATH:
        return None
    for step in score_steps.read(mirror, node):
        if step.source in seen:
            continue
        found = _climb(mirror, step.source, [*taken, step], deepest, seen)
        if found is not None:
            return found
    return None


def _match(
    mirror: Mirror, softmax: Softmax, product: Contraction, steps: list[Step], *, with_sinks: bool = True
) -> Match:
    """Match the nodes around a softmax. with_sinks: a factor after the softmax may be the share of sinks."""
    anchor = softmax.node
    meaning = _fresh_labels(product)
    scores = score_chain.follow(product, steps, tuple(meaning[x] for x in product.out_labels))
    key = score_chain.softmax_axis(softmax.dim, scores)
    keys_on_the_right, query, batch = _roles(anchor, product, meaning, key)
    sums = denominators.of(mirror, softmax, scores, steps, key)
    own = frozenset({*softmax.nodes, *(s.node for s in steps), *(u for s in steps for u in s.uses)})
    others = own | sums.nodes | sums.others
    _check_readers(mirror, others, product, steps)
    if not (with_sinks or softmax.is_divided):
        raise AxisError("the sinks differ from query to query, and a kernel takes one number a head")
    sunk = sinks.behind(mirror, anchor, scores.dims, sums, others) if with_sinks else None
    if sunk is not None:
        scores.dims = sunk.dims
    start = anchor if sunk is None else sunk.node
    is_one = sunk.logits is None if sunk is not None else softmax.is_divided
    way = weights_chain.to_values(mirror, start, softmax.nodes)
    weighted, masks = way.product, len(scores.keeps)
    for each in (product, weighted):
        _check_addend(mirror, each)
    weights = weights_chain.follow(mirror, start, way, scores, key, is_one=is_one)
    out_dims, v_node, v_dims, d_v = _values(mirror, start, weighted, weights, key)
    out, is_returned = weighted.node, way.is_read and sunk is None
    while with_sinks and (sunk is None or sunk.logits is None):
        known = sums if sunk is None else replace(sums, of_weights=ONE)
        further = sinks.behind(
            mirror, out, out_dims, known, others if sunk is None else others | sunk.nodes, keeps_dtype=True
        )
        if further is None:
            break
        out, out_dims = further.node, further.dims
        sunk = further if sunk is None else replace(further, nodes=sunk.nodes | further.nodes)
    if not softmax.is_divided:
        _check_divided(mirror, softmax, sunk, product, steps, is_read=is_returned)
    covered = frozenset({product.node, *(s.node for s in steps), *softmax.nodes, *way.nodes, weighted.node})
    with_logits = sunk is not None and sunk.logits is not None
    lse = None if with_logits else denominators.read(mirror, sums, covered, out)
    if with_logits and scores.sinks is not None:
        raise AxisError("two sinks join one sum")
    if with_sinks and not with_logits and scores.sinks is None:
        denominators.check_maximum(mirror, steps)
    is_of_others = bool(sums.others if sunk is None else sums.others - sunk.nodes)
    if lse is not None or with_logits or is_of_others:
        is_masked_later = len(scores.keeps) > masks
        denominators.check(softmax, scores, is_masked_later=is_masked_later, is_of_others=is_of_others)
    q_node, k_node = (product.lhs, product.rhs) if keys_on_the_right else (product.rhs, product.lhs)
    q_labels, k_labels = product.lhs_labels, product.rhs_labels
    if not keys_on_the_right:
        q_labels, k_labels = k_labels, q_labels
    q, q_factor = _operand(mirror, product.node, q_node, operands.dims_by_label(q_labels, meaning, q_node), out)
    k, k_factor = _operand(mirror, product.node, k_node, operands.dims_by_label(k_labels, meaning, k_node), out)
    v, _ = operands.read(mirror, v_node, v_dims, used=weighted.node, until=out)
    scale = scores.scale * q_factor * k_factor
    added, masking = _split_masks(mirror, scores)
    return assembly.assemble(
        pattern=NAME,
        decomposed=True,
        anchor=anchor,
        first=product.node,
        out=out,
        out_dims=out_dims,
        q=q,
        k=k,
        v=v,
        batch_dims=batch,
        query=query,
        key=key,
        head_dim_qk=tuple(a for label in product.contracted for a in meaning[label]),
        head_dim_v=d_v,
        scores=SiteScores(
            scale=scale,
            factors=tuple(_factor(mirror, scaled, key, out) for scaled in scores.factors),
            changes=tuple(scores.changes),
            additive=tuple(_term(mirror, t, out) for t in added),
            allowed=tuple(_term(mirror, t, out) for t in (*scores.keeps, *masking)),
            limits=tuple(scores.limits),
            sinks=_sinks(mirror, scores, sunk, out),
            dropout_p=weights_chain.dropout(way),
            softmax_dtype=str(views.value(anchor).dtype).removeprefix("torch."),
        ),
        lse=lse,
        returns_weights=way.is_read,
        covered=covered.union(*(x.nodes for x in (sunk,) if x), sums.nodes if sunk is None or lse is not None else ()),
    )


def _check_divided(
    mirror: Mirror, softmax: Softmax, sunk: Sunk | None, product: Contraction, steps: list[Step], *, is_read: bool
) -> None:
    """Require that exponentials are divided by their sum, and by no number that comes from the scores in another way."""
    if sunk is None or is_read:
        rule = "a written-out softmax divides exponentials, or their product with v, by their sum, and nothing else reads them"
        observed = (
            f"{softmax.node.name} is {'read elsewhere, too' if is_read else 'divided by another or a changed sum'}"
        )
        raise Refused(Code.WRITTEN_BY_HAND, rule, observed, at=softmax.node, progress=3)
    own = frozenset({*softmax.nodes, *sunk.nodes, *(s.node for s in steps), *(u for s in steps for u in s.uses)})
    _check_readers(mirror, own, product, steps)


def _check_addend(mirror: Mirror, product: Contraction) -> None:
    """Refuse an unused addend (beta=0) that carries a gradient: the caller may ask for it, and it is zeros."""
    addend = product.node.args[0]
    if product.beta == 0 and isinstance(addend, fx.Node) and gradients.carries(mirror, addend):
        rule = "what a product adds takes part in the result, or wants no gradient"
        observed = f"{product.node.name} adds it with beta=0"
        remedy = "leave the added tensor out (torch.bmm), or detach it"
        raise Refused(Code.PRODUCT_ADDS, rule, observed, at=product.node, progress=2, remedy=remedy)


def _fresh_labels(product: Contraction) -> dict[int, Dim]:
    """Make a new atom for each label. If one operand broadcasts (size 1), the other one gives the size."""
    sizes: dict[int, axes.Size] = {}
    for node, labels in ((product.lhs, product.lhs_labels), (product.rhs, product.rhs_labels)):
        for label, size in zip(labels, axes.shape_exprs(views.value(node)), strict=True):
            if sizes.get(label, axes.ONE) == axes.ONE:
                sizes[label] = size
    return {label: (Atom(size),) for label, size in sizes.items()}


def _roles(anchor: fx.Node, product: Contraction, meaning: dict[int, Dim], key: Dim) -> tuple[bool, Dim, Dims]:
    """Return (k is the right operand, query atoms, batch axes). The keys are the free axis that the softmax runs over."""
    for right in (True, False):
        k_free, q_free = (product.rhs_free, product.lhs_free) if right else (product.lhs_free, product.rhs_free)
        if [a for label in k_free for a in axes.resolve(meaning[label])] == list(key) and q_free and key:
            query = q_free[-1]
            batch = [label for label in product.out_labels if label not in k_free and label != query]
            return right, axes.resolve(meaning[query]), tuple(meaning[label] for label in batch)
    rule = "the softmax runs over exactly the free axis of one operand of the product: the keys"
    observed = f"{anchor.name} runs over another axis of {product.node.name}"
    raise Refused(Code.SOFTMAX_AXIS, rule, observed, at=anchor, progress=2)


def _check_readers(mirror: Mirror, allowed: frozenset[fx.Node], product: Contraction, steps: list[Step]) -> None:
    """Require that other readers of the scores, besides sums of them, leave the scores alone, and do not join them again.

    They get the model's own scores, and the kernel computes its own. On a CPU that has 1.5 times Inductor's speed without gradients.
    A reader with a gradient needs the scores anyway: 0.9. Two softmaxes have 0.9 to 2.0, more at longer lengths (512 and 1536 tokens).
    """
    made = (product.node, *(s.node for s in steps))
    is_written = any(mirror.writers_into(node).nodes for node in made)
    for node in made:
        for user in mirror.readers(node):
            if user in allowed or not views.reads_elements(user, node):
                continue
            at = node if user.op == "output" else user
            is_cheap = _reaches_softmax(mirror, node, user) or not gradients.carries(mirror, at)
            joins = is_written or not allowed.isdisjoint(reached([user], attrgetter("users")))
            if joins or not is_cheap:
                rule = "nothing besides the softmax takes a gradient to the scores, changes them or joins them again"
                observed = f"{'the graph returns' if at is node else user.name + ' reads'} {node.name}"
                raise Refused(Code.SCORES_READ, rule, observed, at=at, progress=4, remedy=_JOINED if joins else None)


def _reaches_softmax(mirror: Mirror, scores: fx.Node, node: fx.Node) -> bool:
    """Return whether steps on the scores, of which `node` is the first, lead to a softmax and nowhere else."""
    while node.target not in ANCHORS and len(node.users) == 1:
        if all(step.source is not scores for step in score_steps.read(mirror, node)):
            return False
        scores, node = node, next(iter(node.users))
    return node.target in ANCHORS


def _factor(mirror: Mirror, scaled: Scaled, key: Dim, out: fx.Node) -> Factor:
    """Read a scale where the model reads it. The kernel multiplies later, so nothing may write to the scale in between."""
    value = scaled.by.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        writer = mutation.written_between(mirror, scaled.by, scaled.used, out)
        if writer is not None:
            raise AxisError(f"the scale {scaled.by.name} is written in place by {writer.name}")
        return Factor(node=scaled.by, divide=scaled.divide)
    dims = operands.broadcast_dims(scaled.by, scaled.dims)
    if {a for dim in dims for a in axes.resolve(dim)} & set(axes.resolve(key)):
        raise AxisError(f"{scaled.used.name} multiplies the scores with numbers that differ from key to key")
    operand, _ = operands.read(mirror, scaled.by, dims, used=scaled.used, until=out)
    return Factor(node=scaled.by, divide=scaled.divide, operand=operand)


def _values(
    mirror: Mirror, anchor: fx.Node, weighted: Contraction, weights: Dims, key: Dim
) -> tuple[Dims, fx.Node, Dims, Dim]:
    """Return (dims of the output, node of v, dims of v, head-dim atoms of v). Raises Refused if the product is not over the keys."""
    on_the_left = weights_chain.carries_weights(mirror, weighted.lhs, anchor)
    w_labels, v_labels = weighted.lhs_labels, weighted.rhs_labels
    v_node, free = weighted.rhs, weighted.rhs_free
    if not on_the_left:
        w_labels, v_labels, v_node, free = v_labels, w_labels, weighted.lhs, weighted.lhs_free
    meaning = dict(zip(w_labels, weights, strict=True))
    contracted = [a for label in weighted.contracted for a in axes.resolve(meaning[label])]
    if contracted != list(axes.resolve(key)):
        rule = "the product with v contracts the axis that the softmax ran over"
        observed = f"{weighted.node.name} sums over another axis than {anchor.name}"
        raise Refused(Code.SOFTMAX_AXIS, rule, observed, at=weighted.node, progress=4)
    if len(free) != 1:
        raise AxisError(f"{weighted.node.name} leaves {len(free)} axes of v, and not its head dim alone")
    size = axes.shape_exprs(views.value(v_node))[v_labels.index(free[0])]
    meaning[free[0]] = (Atom(size),)
    out_dims = tuple(meaning[label] for label in weighted.out_labels)
    return out_dims, v_node, operands.dims_by_label(v_labels, meaning, v_node), meaning[free[0]]


def _operand(mirror: Mirror, product: fx.Node, node: fx.Node, dims: Dims, out: fx.Node) -> tuple[Operand, float]:
    return operands.read(mirror, node, dims, used=product, until=out, through_scales=True)


def _split_masks(mirror: Mirror, scores: Scores) -> tuple[list[Joined], list[Joined]]:
    """Split the tensors added to the scores: the others, and those that only mask, as their conditions."""
    added: list[Joined] = []
    masking: list[Joined] = []
    for term in scores.additive:
        condition = condition_of_mask(mirror, term)
        if condition is None:
            added.append(term)
        else:
            masking.append(condition)
    return added, masking


def condition_of_mask(mirror: Mirror, term: Joined) -> Joined | None:
    """Return the condition of an added tensor that is 0 where it holds (or, inverted, does not) and masks elsewhere.

    None for any other tensor, and for one that is written to later.

    Adding such a tensor and masking by its condition differ only in rows without any allowed key: 0 here, the mean of v there. Kernels are
    slower with float32's lowest number than with -inf.
    """
    path = [term.node]
    while views.is_view(path[-1]) and path[-1].target in _KEEP_ALIGNMENT:
        path.append(views.source(path[-1]))
    top = path[-1]
    if any(mutation.is_written_later(mirror, node) for node in path):
        return None
    if top.target not in (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar):
        return None
    condition = top.args[0]
    yes, no = (constants.number(mirror, x) for x in top.args[1:3])
    if not isinstance(condition, fx.Node) or yes is None or no is None:
        return None
    yes, no = (rounded(number, *reversed(path)) for number in (yes, no))
    if yes == 0 and no <= MASKED_BELOW and no * term.weight <= STILL_MASKED_BELOW:
        return Joined(node=condition, dims=term.dims, used=top, inverted=False, fill=no * term.weight)
    if no == 0 and yes <= MASKED_BELOW and yes * term.weight <= STILL_MASKED_BELOW:
        return Joined(node=condition, dims=term.dims, used=top, inverted=True, fill=yes * term.weight)
    return None


def _term(mirror: Mirror, joined: Joined, out: fx.Node) -> Term:
    """Read a tensor at the model's reader, since it may be written to after its creation."""
    site_dims = operands.broadcast_dims(joined.node, joined.dims)
    operand, _ = operands.read(mirror, joined.node, site_dims, used=joined.used, until=out)
    return Term(operand=operand, **{field.name: getattr(joined, field.name) for field in fields(Joining)})


def _sinks(mirror: Mirror, scores: Scores, sunk: Sunk | None, out: fx.Node) -> Operand | float | None:
    is_column = sunk is None or sunk.logits is None
    logits = scores.sinks if sunk is None or is_column else sunk.logits
    if logits is None or isinstance(logits, float):
        return logits
    dims = (*logits.dims[:-1], ()) if is_column else operands.broadcast_dims(logits.node, logits.dims)
    operand, _ = operands.read(mirror, logits.node, dims, used=logits.used, until=out)
    return operand
