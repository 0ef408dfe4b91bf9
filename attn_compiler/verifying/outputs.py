"""Comparison of a lowered site's output with the model's own, both computed from the model's own values on the first call.

Exact: the model's own operations on the same inputs of the site, in float32 for 16-bit outputs and in float64 for others. The inputs are
the model's own, so errors of other sites do not add up, and the rule is as tight for the last layer as for the first. Rows without keys are
left out if the model's own masking, by -inf, gives NaN: a kernel gives 0 there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.lowerings.base import FP8, OF_LATENT
from attn_compiler.passes.graph import axes, mutation, program
from attn_compiler.passes.graph.emit import FakeBuilder
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Latent, Match
from attn_compiler.spec.numerics import FACTOR, FACTOR_SOFTCAP, FLOOR_ULPS, difference, exact_dtype, largest
from attn_compiler.verifying import comparing, pairs
from attn_compiler.verifying.comparing import Compared, Rule
from attn_compiler.verifying.interpreting import Noise, is_floating
from attn_compiler.verifying.values import Check, NoValueError, Values, require_computable


@dataclass(kw_only=True, eq=False)
class OutputCheck(Check):
    """new_out: the node of the site's output in the rewritten graph, if it was rewritten."""

    subject = "output"

    new_out: fx.Node | None = None

    @property
    def is_as_it_was(self) -> bool:
        """True if the site was left as the model made it."""
        return self.site.spec is None or self.site.decision is None or self.new_out is None

    @property
    def factor(self) -> float:
        """The factor of the rule."""
        return FACTOR if self.site.spec is None or self.site.spec.score.softcap is None else FACTOR_SOFTCAP

    @property
    def what(self) -> str:
        """The name of the compared tensor, for people."""
        return f"output of {self.site.decision.lowering}" if self.site.decision is not None else "output"

    def read(self, values: Values) -> None:
        site = self.site
        if site.spec is None or self.is_as_it_was or self.new_out is None:
            raise NoValueError("the site is as the model made it")
        if site.spec.score.dropout_p > 0:
            raise NoValueError("dropout draws other numbers in every kernel")
        self.read_own(values)
        values.rewritten(self.body, self.new_out)

    def read_own(self, values: Values) -> None:
        """Read the inputs of `beside_own`. Raises NoValueError, also if the rule does not cover the lowering."""
        if self.site.decision is not None and self.site.decision.lowering in FP8:
            raise NoValueError("FP8 rounds more than the rule allows for")
        values.mirror(self.site.match.out)
        recomputed(self, values)
        pairs.own(self.site, values)
        values.mirror(self.site.match.v.node)

    def compare(self, values: Values) -> Compared:
        if self.new_out is None:
            raise NoValueError("the site is as the model made it")
        new = comparable(values.rewritten(self.body, self.new_out))
        return self.beside_own(new, values, self.kept_rows(values), self.what)

    def beside_own(self, new: torch.Tensor, values: Values, kept: torch.Tensor | None, what: str) -> Compared:
        """Compare a tensor with the model's result at a site, as `held` does."""
        own, v = comparable(values.mirror(self.site.match.out)), values.mirror(self.site.match.v.node)

        def run(noise: Noise | None) -> torch.Tensor:
            with torch.autocast(v.device.type, enabled=False):
                return recomputed(self, values, exact_dtype(own.dtype), noise)

        return self.held(new, own, run, v, kept, what, pairs.mask_formula(self.site))

    def held(
        self,
        new: torch.Tensor,
        own: torch.Tensor,
        run: Callable[[Noise | None], torch.Tensor],
        v: torch.Tensor,
        kept: torch.Tensor | None,
        what: str,
        formula: str,
    ) -> Compared:
        """Compare `new` with the exact result by the rule. Raises VerificationMismatch, or NoValueError.

        own: the result in the model's own dtypes. run: computes the exact one, or one with noise on each step. v: the weighted operand.
        kept: the elements that count, None: all. what: the name of `new`, for people. formula: of the mask.
        """
        weighted = float(v.abs().max()) if v.numel() else 0.0
        site, factor = self.site.module, self.factor
        rule = Rule(site=site, formula=formula, names=[what], factor=factor, weighted=weighted, kept=kept)
        try:
            found = comparing.compare([new], [own], lambda noise: [run(noise)], rule)
        except torch.OutOfMemoryError as error:
            raise NoValueError("there is not enough memory for the exact result") from error
        if kept is None or found.allowed is None:
            return found
        off = difference(new, own.to(exact_dtype(own.dtype)))
        return dataclasses.replace(found, left_out=largest(off, ~kept.expand_as(own)) > found.allowed)

    def kept_rows(self, values: Values) -> torch.Tensor | None:
        """Return the elements of the output in rows with keys, or that are numbers, in its own dimensions; None if all are."""
        own = comparable(values.mirror(self.site.match.out))
        if not bool(own.isnan().any()):
            return None
        rows = pairs.rows_with_keys(self.site, values)
        kept = self.spread(None if rows is None else rows.to(own.device), values)
        return None if kept is None else kept | ~own.isnan()

    def spread(self, rows: torch.Tensor | None, values: Values) -> torch.Tensor | None:
        """Return the elements of the output that belong to rows, in the output's own dimensions; None if all do. rows: broadcasts to (B,
        Hq, Sq, 1)."""
        if rows is None or bool(rows.all()):
            return None
        match = self.site.match
        full = (*pairs.shape(match, values)[:3], values.size(axes.dim_size(match.axes.head_dim_v)))
        kept: torch.Tensor = program.restore(match, RealBuilder(values), rows.expand(full))
        return kept


def comparable(x: Any) -> torch.Tensor:
    """Return the value if it is a tensor of a dtype that FLOOR_ULPS has a tolerance for. Raises NoValueError otherwise."""
    if not isinstance(x, torch.Tensor) or x.dtype not in FLOOR_ULPS:
        raise NoValueError("the output is no tensor of a floating dtype that has a rule")
    return x


class RealBuilder(FakeBuilder[torch.Tensor]):
    """A builder that runs calls on real tensors."""

    def __init__(self, values: Values) -> None:
        self._real = values

    def leaf(self, node: fx.Node) -> torch.Tensor:
        return self._real.tensor(node)

    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def size(self, size: Any, known: Any) -> int:
        return self._real.size(size)


# ---- the model's own operations at a site, again --------------------------------------------------------------------


def dependents(mirror: Mirror, match: Match, starts: Iterable[fx.Node] = ()) -> list[fx.Node]:
    """Return the mirror nodes from the first product to the output, in order, with their writes in place. starts: begin there instead of at
    the first product."""
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


def recomputed(
    check: OutputCheck, values: Values, dtype: torch.dtype | None = None, noise: Noise | None = None
) -> torch.Tensor:
    """Compute the model's own operations at a site. Raises NoValueError. dtype: of every floating step, None: the model's own. noise: on
    each step."""
    latent, decision = check.site.match.reads.latent, check.site.decision
    starts: tuple[fx.Node, ...] = ()
    if decision is not None and decision.lowering in OF_LATENT and isinstance(latent, Latent):
        # The lowering reads the latent of k and v, and skips their roundings.
        starts = latent.k.made, latent.v.made
    inside = dependents(check.body.mirror, check.site.match, starts)
    last_use = {n: node for node in inside for n in (node, *node.all_input_nodes)}
    known: dict[fx.Node, Any] = {}

    def wide(x: Any) -> Any:
        return x.to(dtype) if dtype is not None and is_floating(x) else x

    def value(node: fx.Node) -> Any:
        if node not in known:
            x = wide(values.mirror(node))
            # A copy: writes in place must not reach the model's own values.
            known[node] = x.clone() if isinstance(x, torch.Tensor) else x
        return known[node]

    result = None
    for node in inside:
        if not mutation.writes(node):
            require_computable(node)
        elif not isinstance(node.target, torch._ops.OpOverload):
            raise NoValueError(f"{node.name} can't be run by itself")
        result = values.call(node, value, dtype=dtype)
        if noise is not None:
            result = noise.on_step(result, node.meta.get("val"), map(known.get, node.all_input_nodes))
        known[node] = result
        for used in {node, *node.all_input_nodes}:
            if last_use[used] is node:
                known.pop(used, None)
    if not isinstance(result, torch.Tensor):
        raise NoValueError("the output is no tensor")
    found: torch.Tensor = wide(result)
    return found
