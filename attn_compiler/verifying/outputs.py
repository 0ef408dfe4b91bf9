"""Comparison of a lowered site's output with the model's own, both computed from the model's own values on the first call.

FlashAttention's rule: the lowered output may have twice the error of the model's own (three times with a softcap), plus the rounding of the
result. Exact: the model's own operations on the same inputs of the site, in float32 for 16-bit outputs and in float64 for others. The
site's inputs are the model's own, so errors of other sites do not add up, and the rule is as tight for the last layer as for the first.

Rows without keys are left out if the model's own masking, by -inf, gives NaN: a kernel gives 0 there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.lowerings.base import FP8
from attn_compiler.passes.graph import axes, program
from attn_compiler.passes.graph.site import Site
from attn_compiler.spec.numerics import FACTOR, FACTOR_SOFTCAP, FLOOR_ULPS, difference, exact_dtype, largest
from attn_compiler.verifying import comparing, masks, pairs, recomputing
from attn_compiler.verifying.comparing import Compared, Rule, Words
from attn_compiler.verifying.numbers import Noise
from attn_compiler.verifying.values import Body, NoValueError, Values


def factor(site: Site) -> float:
    """Return the factor of the rule."""
    return FACTOR if site.spec is None or site.spec.score.softcap is None else FACTOR_SOFTCAP


def read(site: Site, body: Body, new_out: fx.Node | None, values: Values) -> None:
    """Read the inputs of `check_output`. new_out: in the body's rewritten graph. Raises NoValueError."""
    if site.spec is None or site.decision is None or new_out is None:
        raise NoValueError("the site is as the model made it")
    if site.spec.score.dropout_p > 0:
        raise NoValueError("dropout draws other numbers in every kernel")
    read_own(site, body, values)
    values.rewritten(body, new_out)


def read_own(site: Site, body: Body, values: Values) -> None:
    """Read the inputs of `beside_own`. Raises NoValueError, also if the rule does not cover the lowering."""
    if site.decision is not None and site.decision.lowering in FP8:
        raise NoValueError("FP8 rounds more than the rule allows for")
    values.mirror(site.match.out)
    recomputing.output(site, body, values)
    for term in pairs.terms(site):
        pairs.term_tensor(term, values)
    values.mirror(site.match.v.node)


def check_output(site: Site, body: Body, new_out: fx.Node, values: Values) -> Compared:
    """Compare one site's output. Raises VerificationMismatch, or NoValueError."""
    new, own = floating(values.rewritten(body, new_out)), floating(values.mirror(site.match.out))
    return beside_own(site, body, new, values, kept_rows(site, values, own), lowered(site))


def beside_own(
    site: Site, body: Body, new: torch.Tensor, values: Values, kept: torch.Tensor | None, what: str
) -> Compared:
    """Compare a tensor with the model's result at a site. kept, what: as in `compared`. Raises as that does."""
    own, v = floating(values.mirror(site.match.out)), values.mirror(site.match.v.node)
    dtype = exact_dtype(own.dtype)

    def run(noise: Noise | None) -> torch.Tensor:
        with torch.autocast(v.device.type, enabled=False):
            return recomputing.output(site, body, values, dtype=dtype, noise=noise)

    return compared(site, new=new, own=own, run=run, v=v, kept=kept, what=what)


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
    """Compare `new` with the exact result by the rule. Raises VerificationMismatch, or NoValueError.

    own: the result in the model's own dtypes. run: computes the exact one, or one with noise on each step. v: the weighted operand. kept:
    the elements that count, None: all. what: the name of `new`, for people. formula: of the mask, None: the recovered one.
    """
    weighted = float(v.abs().max()) if v.numel() else 0.0
    rule = Rule(factor=factor(site), weighted=weighted, kept=kept)
    words = Words(names=lambda: [what], site=site.module, formula=formula or masks.formula(site))
    try:
        found = comparing.compare([new], [own], lambda noise: [run(noise)], rule, words)
    except torch.OutOfMemoryError as error:
        raise NoValueError("there is not enough memory for the exact result") from error
    if kept is None or found.allowed is None:
        return found
    off = difference(new, own.to(exact_dtype(own.dtype)))
    return dataclasses.replace(found, left_out=largest(off, ~kept.expand_as(own)) > found.allowed)


def floating(x: Any) -> torch.Tensor:
    """Return a value as a tensor of a dtype with a rule. Raises NoValueError."""
    if not isinstance(x, torch.Tensor) or x.dtype not in FLOOR_ULPS:
        raise NoValueError("the output is no tensor of a floating dtype that has a rule")
    return x


def kept_rows(site: Site, values: Values, own: torch.Tensor) -> torch.Tensor | None:
    """Return the elements of the output in rows with keys, or that are numbers, in its own dimensions; None if all are."""
    if not bool(own.isnan().any()):
        return None
    rows = pairs.rows_with_keys(site, values)
    kept = spread(site, None if rows is None else rows.to(own.device), values)
    return None if kept is None else kept | ~own.isnan()


def spread(site: Site, rows: torch.Tensor | None, values: Values) -> torch.Tensor | None:
    """Return the elements of the output that belong to rows, in the output's own dimensions; None if all do. rows: broadcasts to (B, Hq,
    Sq, 1)."""
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
    """A builder that runs calls on real tensors."""

    values: Values

    def leaf(self, node: fx.Node) -> torch.Tensor:
        return self.values.tensor(node)

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
    """Return the name of the compared tensor, for people."""
    return f"output of {site.decision.lowering}" if site.decision is not None else "output"
