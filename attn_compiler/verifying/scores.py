"""Comparison of the proved biases with the model's own: their sum at every (b, h, q, k) that is not masked.

Rounding is allowed, in each batch row and head: the model rounds after each of its operations, and the kinds' expressions are evaluated in
float64. Numbers cut to integers (T5's buckets) may fall on either side of a near boundary. Masking elements are left to the mask
(masks.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import torch
from torch import fx

from attn_compiler.index_expr import Apply, Expr, parts
from attn_compiler.passes.graph.site import Site
from attn_compiler.spec.numerics import difference, largest
from attn_compiler.verifying import pairs
from attn_compiler.verifying.comparing import Compared
from attn_compiler.verifying.pairs import BIASED_MASKED_BELOW, MASKED, Recovered, Slice
from attn_compiler.verifying.values import NoValueError, Values

#: rounding ops on floats, without a final underscore -> the largest error in units in the last place.
#: For a power or an exponential it grows with the exponent's own error
_ROUNDED = dict.fromkeys(("add", "sub", "rsub", "mul", "div", "reciprocal", "to", "_to_copy", "type_as"), 1) | {
    "log": 2,
    "exp": 16,
    "exp2": 16,
    "pow": 16,
}
#: units for the fill value of an element, and for the sum with other biases
_ALWAYS = 2
#: units for operations outside of the body that a bias is passed to, which are not searched
_OUTSIDE = 8


def read(site: Site, values: Values) -> None:
    """Read the inputs of `check_biases`. Raises NoValueError."""
    pairs.read(site, [(kind.summand, site.score_loads) for kind in pairs.biases(site)], values)


def words(site: Site) -> str | None:
    """Return the proved biases, for people."""
    return site.spec.score.added if site.spec is not None else None


def recovered(site: Site, values: Values) -> Recovered:
    """Return the proved biases. Raises NoValueError."""
    said = {"what": "recovered bias", "gives": "numbers that are added", "allowed": "rounding"}
    summands = [kind.summand for kind in pairs.biases(site)]
    return Recovered.from_site(site, values, summands, site.score_loads, formula=str(words(site)), **said)


def check_biases(site: Site, values: Values) -> Compared:
    """Compare slice by slice. Raises VerificationMismatch, or NoValueError."""
    if not site.added:
        raise NoValueError("the model adds no tensor")
    added, relative = recovered(site, values), rounding(site, values)
    return Compared.merged(_compared(at, added, relative) for at in added.slices())


def _compared(at: Slice, added: Recovered, relative: float) -> Compared:
    summands = [kind.summand for kind in pairs.biases(added.site)]
    here = [one.at(at) for one in added.own]
    size = (1, 1, at.end - at.first, added.sizes[3])
    kept = (pairs.combined([pairs.effects(one, BIASED_MASKED_BELOW) for one in here]) != MASKED).expand(size)
    terms = [(one.x.to(torch.float64) * one.term.weight).expand(size) for one in here if one.adds]
    exact = reduce(torch.add, terms)
    allowed = relative * max(largest(x, kept & x.isfinite()) for x in terms)

    def total(nudge: float) -> torch.Tensor:
        """Return the sum of the kinds, float64."""
        found = [added.on(x, at, exact.device, nudge=nudge) for x in summands]
        return sum(found, exact.new_zeros(())).expand(exact.shape)

    def off(nudge: float) -> torch.Tensor:
        return torch.where(kept, difference(total(nudge), exact), 0.0)

    error = off(0.0)
    for nudge in (relative, -relative) if any(map(_cuts_off, summands)) and bool((error > allowed).any()) else ():
        error = torch.minimum(error, off(nudge))
    found = float(error.max()) if error.numel() else 0.0
    if not found <= allowed:
        place = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        ours, theirs = (f"{x[place].item():.6g}" for x in (total(0.0), exact))
        said = {"expected": theirs, "observed": ours, "allowed": f"a difference of {allowed:.3g}"}
        raise added.mismatch(at, place[2], place[3], error > allowed, **said)
    return Compared(elements=int(kept.sum()), error=found, allowed=allowed)


def _cuts_off(x: Expr) -> bool:
    return (isinstance(x, Apply) and x.op == "int") or any(map(_cuts_off, parts(x)))


# ---- the rounding error of the model's sum ---------------------------------------------------------------------------


def rounding(site: Site, values: Values) -> float:
    """Return the largest error of the model's addition at a site, relative to its largest number. It sums the errors of the operations
    between the addition and the tensors that it is read from."""
    loads = {version.node for version in site.score_loads.values()}
    total = 0.0
    for node in _between(site, loads):
        name = node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else ""
        total += _ROUNDED.get(name.rstrip("_"), 0) * _epsilon(node)
        if node.op == "placeholder" and node not in loads and len(values.bodies) > 1:
            total += _OUTSIDE * max(_epsilon(n) for graph in values.bodies for n in graph.nodes)
    ends = [_epsilon(term.operand.node) or torch.finfo(torch.float32).eps for term in site.added]
    return total + _ALWAYS * max(ends, default=0.0)


def _between(site: Site, loads: set[fx.Node]) -> Iterator[fx.Node]:
    """Yield the nodes that compute the addition, up to the loads."""
    waiting = [term.operand.node for term in site.added]
    seen: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting.extend(() if node in loads else node.all_input_nodes)


def _epsilon(node: fx.Node) -> float:
    """Return the eps of a node's floating dtype, else 0."""
    value = node.meta.get("val")
    return torch.finfo(value.dtype).eps if isinstance(value, torch.Tensor) and value.is_floating_point() else 0.0
