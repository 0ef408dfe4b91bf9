"""The output of a lowered site against the model's own, both computed from the model's own values on the first call.

What is allowed is FlashAttention's rule: the lowered output may be off from the exact one by twice what the model's own is off
by (three times with a softcap), plus the rounding of the result. Exact: the model's own operations on the same inputs of the
site, in float32 for 16-bit outputs and in float64 for others. The site's inputs are the model's own, so errors of other
sites do not add up, and the rule can be as tight for the last layer as for the first.

Left out are rows without any key in which the model's own masking, by -inf, gives no number: a kernel gives 0 there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.lowerings.base import FP8, OF_LATENT
from attn_compiler.passes.graph import axes, mutation, program
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Latent, Match, Site
from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.verifying import masks, pairs
from attn_compiler.verifying.numbers import (
    FLOOR_ULPS,
    NOISY_RUNS,
    NOISY_RUNS_OF_STEEP,
    STEEP,
    Noise,
    difference,
    exact_dtype,
    largest,
)
from attn_compiler.verifying.values import Body, Key, NoValueError, Values, require_computable

FACTOR, FACTOR_SOFTCAP = 2.0, 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """elements: how many. error: the largest difference. allowed: its limit. left_out: there are others, which differ and may."""

    elements: int
    error: float
    allowed: float
    left_out: bool = False


def needs(site: Site, body: Body, new_out: fx.Node | None, values: Values) -> set[Key]:
    """What has to be recorded for `check`. new_out: in the body's rewritten graph. Raises NoValueError where it can't be."""
    if site.spec is None or site.decision is None or new_out is None:
        raise NoValueError("the site is as the model made it")
    if site.spec.score.dropout_p > 0:
        raise NoValueError("dropout draws other numbers in every kernel")
    return exact_needs(site, body, values) | values.rewritten_needs(body, new_out)


def exact_needs(site: Site, body: Body, values: Values) -> set[Key]:
    """What has to be recorded for `beside_own`. Raises NoValueError where it can't be, and where the rule is not for the lowering."""
    if site.decision is not None and site.decision.lowering in FP8:
        raise NoValueError("FP8 rounds more than the rule allows for")
    inside = dependents(body.mirror, site.match, projections(site))
    found = values.needs(site.match.out)
    for node in inside:
        _require_exact(node)
    known = set(inside)
    for leaf in (n for node in inside for n in node.all_input_nodes if n not in known):
        found |= values.needs(leaf)
    for term in pairs.terms(site):
        found |= pairs.term_needs(term, values)
    return found | values.needs(site.match.v.node)


def _require_exact(node: fx.Node) -> None:
    if not mutation.writes(node):
        require_computable(node)
    elif not isinstance(node.target, torch._ops.OpOverload):
        raise NoValueError(f"{node.name} can't be run by itself")


def projections(site: Site) -> tuple[fx.Node, ...]:
    """What the model makes k and v by, if the lowering reads what they are made of: k and v are rounded on the way that it leaves out."""
    latent = site.match.reads.latent
    if site.decision is None or site.decision.lowering not in OF_LATENT or not isinstance(latent, Latent):
        return ()
    return latent.k.made, latent.v.made


def dependents(mirror: Mirror, match: Match, starts: Iterable[fx.Node] = ()) -> list[fx.Node]:
    """The mirror nodes that make the output from the first product, in order: those on the way, and what they write in place.

    starts: from there, and not from the first product.
    """
    reached: set[fx.Node] = set(starts) or {match.first}
    first = min(map(mirror.order, reached))
    span = []
    for node in mirror.graph.nodes:
        if not first <= mirror.order(node) <= mirror.order(match.out):
            continue
        if node in reached or any(n in reached for n in node.all_input_nodes):
            reached.add(node)
            span.append(node)
    wanted = {match.out}
    for node in reversed(span):
        if node in wanted or mutation.writes(node):
            wanted.update((node, *(n for n in node.all_input_nodes if n in reached)))
    return [node for node in span if node in wanted]


def check(site: Site, body: Body, new_out: fx.Node, values: Values) -> Compared:
    """Compare one site's output. Raises VerificationMismatch, or NoValueError."""
    new = floating(values.rewritten(body, new_out))
    return beside_own(
        site, body, new, values, kept_rows(site, values, floating(values.mirror(site.match.out))), lowered(site)
    )


def beside_own(
    site: Site, body: Body, new: torch.Tensor, values: Values, kept: torch.Tensor | None, what: str
) -> Compared:
    """A tensor against what the model computes at a site. kept: as `kept_rows`. what: the tensor is, for people. Raises
    VerificationMismatch, or NoValueError."""
    own = floating(values.mirror(site.match.out))
    dtype = exact_dtype(own.dtype)

    def run(noise: Noise | None) -> torch.Tensor:
        return _exact(site, body.mirror, values, dtype, noise)

    return compared(site, new=new, own=own, run=run, v=values.mirror(site.match.v.node), kept=kept, what=what)


def compared(
    site: Site,
    *,
    new: torch.Tensor,
    own: torch.Tensor,
    run: Callable[[Noise | None], torch.Tensor],
    v: torch.Tensor,
    kept: torch.Tensor | None,
    what: str,
    formula: str | None = None,
) -> Compared:
    """Whether `new` is as near to the exact result as the rule asks. Raises VerificationMismatch, or NoValueError.

    own: the result in the model's own dtypes. run: gives the exact one, or one with noise on each step. v: what is weighted. kept: which
    elements count, None: all. what: `new` is, for people. formula: of the mask, None: as it was read.
    """
    if (new.shape, new.dtype) != (own.shape, own.dtype):
        raise _mismatch(
            site,
            what,
            formula,
            index="every element",
            expected=f"{own.dtype} {list(own.shape)}",
            observed=f"{new.dtype} {list(new.shape)}",
            allowed="no difference",
            differing="all elements",
        )
    try:
        exact = run(None)
    except torch.OutOfMemoryError as error:
        raise NoValueError("there is not enough memory for the exact result") from error
    largest_v = float(v.abs().max()) if v.numel() else 0.0
    own_error, new_error = (difference(x, exact) for x in (own, new))
    # Where the model's own result overflows and the exact one does not, there is nothing to compare with.
    counts = ~own_error.isinf() if kept is None else kept & ~own_error.isinf()
    floor = FLOOR_ULPS[own.dtype] * torch.finfo(own.dtype).eps * max(largest(exact, counts), largest_v)
    factor = FACTOR if site.spec is None or site.spec.score.softcap is None else FACTOR_SOFTCAP
    allowed = factor * largest(own_error, counts) + floor
    found = largest(new_error, counts)
    if not found <= allowed:
        # Other roundings of the same math may come as far: of float64 there is no wider run that would tell.
        for noisy in _noises(run, exact, counts):
            allowed = max(allowed, factor * noisy + floor)
            if found <= allowed:
                break
    if not found <= allowed:
        wrong = torch.where(counts, new_error, 0.0)
        place = tuple(int(i) for i in torch.unravel_index(wrong.argmax(), wrong.shape))
        raise _mismatch(
            site,
            what,
            formula,
            index=str(list(place)),
            expected=f"{own[place].item():.6g} (exactly {exact[place].item():.6g})",
            observed=f"{new[place].item():.6g}",
            allowed=f"an error of {allowed:.3g}",
            differing=f"{int((wrong > allowed).sum())} of {wrong.numel()} elements",
        )
    others = False if kept is None else largest(difference(new, own.to(exact.dtype)), ~kept.expand_as(own)) > allowed
    return Compared(elements=int(counts.sum()), error=found, allowed=allowed, left_out=others)


def floating(x: Any) -> torch.Tensor:
    """A value as a tensor that the rule is for. Raises NoValueError."""
    if not isinstance(x, torch.Tensor) or x.dtype not in FLOOR_ULPS:
        raise NoValueError("the output is no tensor of a floating dtype that has a rule")
    return x


def _noises(run: Callable[[Noise | None], torch.Tensor], exact: torch.Tensor, counts: torch.Tensor) -> Iterator[float]:
    """How far the exact result moves if each step's result is off by a rounding of its own dtype, in several runs."""
    steep = STEEP * largest(exact, counts)
    moved = 0.0
    for seed in range(NOISY_RUNS_OF_STEEP):
        if seed >= NOISY_RUNS and moved <= steep:
            return
        now = largest(difference(run(Noise(seed=seed)), exact), counts)
        moved = max(moved, now)
        yield now


def _exact(site: Site, mirror: Mirror, values: Values, dtype: torch.dtype, noise: Noise | None) -> torch.Tensor:
    """The model's own operations in a wider dtype."""
    match = site.match
    inside = dependents(mirror, match, projections(site))
    last_use = {n: node for node in inside for n in (node, *node.all_input_nodes)}
    known: dict[fx.Node, Any] = {}

    def value(node: fx.Node) -> Any:
        if node not in known:
            known[node] = _wide(values.mirror(node), dtype)
        return known[node]

    result = None
    with torch.autocast(values.mirror(match.v.node).device.type, enabled=False):
        for node in inside:
            result = values.call(node, value, dtype=dtype)
            if noise is not None:
                result = noise.on_step(result, node.meta.get("val"), map(known.get, node.all_input_nodes))
            known[node] = result
            for used in {node, *node.all_input_nodes}:
                if last_use[used] is node:
                    known.pop(used, None)
    exact: torch.Tensor = _wide(result, dtype)
    return exact


def _wide(x: Any, dtype: torch.dtype) -> Any:
    """A copy in the wider dtype: what is written in place must not reach the model's own values."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.to(dtype, copy=True) if x.is_floating_point() else x


def kept_rows(site: Site, values: Values, own: torch.Tensor) -> torch.Tensor | None:
    """Which elements of the output belong to rows with keys, or are numbers, in the output's own dimensions; None if all are."""
    if not bool(own.isnan().any()):
        return None
    rows = pairs.rows_with_keys(site, values)
    kept = spread(site, None if rows is None else rows.to(own.device), values)
    return None if kept is None else kept | ~own.isnan()


def spread(site: Site, rows: torch.Tensor | None, values: Values) -> torch.Tensor | None:
    """The elements of the output that belong to rows, in the output's own dimensions; None if all do.

    rows: broadcasts to (B, Hq, Sq, 1).
    """
    if rows is None or bool(rows.all()):
        return None
    match = site.match
    batch, heads, seqlen_q, _ = pairs.shape(match, values)
    head_dim = values.size(axes.dim_size(match.axes.head_dim_v))
    found = rows.expand(batch, heads, seqlen_q, head_dim)
    kept: torch.Tensor = program.restore(match, RealBuilder(values), found)
    return kept


@dataclass(frozen=True)
class RealBuilder:
    """Runs calls on real tensors."""

    values: Values

    def leaf(self, node: fx.Node) -> torch.Tensor:
        found = self.values.mirror(node)
        if not isinstance(found, torch.Tensor):
            raise NoValueError(f"{node.name} is no tensor")
        return found

    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def size(self, size: Any, known: Iterable[fx.Node]) -> int:
        return self.values.size(size)

    def once(self, key: Any, make: Any) -> Any:
        return make()

    def hold(self, x: torch.Tensor, key: Any, *, operand: str, why: str) -> torch.Tensor:
        return x.clone()


def lowered(site: Site) -> str:
    """What is compared, for people."""
    return f"output of {site.decision.lowering}" if site.decision is not None else "output"


def _mismatch(site: Site, what: str, formula: str | None, **found: str) -> VerificationMismatch:
    return VerificationMismatch(site=site.module, what=what, formula=formula or masks.formula(site), **found)
