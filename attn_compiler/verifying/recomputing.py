"""The model's own operations at a site, run again: in other numbers, or from other leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import fx

from attn_compiler.lowerings.base import OF_LATENT
from attn_compiler.passes.graph import mutation
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Latent, Match, Site
from attn_compiler.verifying.numbers import Noise
from attn_compiler.verifying.values import Body, NoValueError, Values, require_computable


def projections(site: Site) -> tuple[fx.Node, ...]:
    """Return the nodes that make k and v, if the lowering reads their latent: it skips the roundings of k and v."""
    latent = site.match.reads.latent
    if site.decision is None or site.decision.lowering not in OF_LATENT or not isinstance(latent, Latent):
        return ()
    return latent.k.made, latent.v.made


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


def made_of(leaves: Iterable[str], site: Site, body: Body) -> Set[fx.Node]:
    """Return the mirror nodes, up to a site's output, that are computed from values recorded under these names."""
    names = frozenset(leaves)
    found: set[fx.Node] = set()
    for node in body.mirror.graph.nodes:
        if body.names.get(node) not in names and any(
            n in found or body.names.get(n) in names for n in node.all_input_nodes
        ):
            found.add(node)
        if node is site.match.out:
            break
    return found


def output(
    site: Site,
    body: Body,
    values: Values,
    *,
    dtype: torch.dtype | None = None,
    noise: Noise | None = None,
    leaves: Mapping[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute the model's own operations at a site. Raises NoValueError.

    dtype: of every floating step, None: the model's own. noise: on each step. leaves: by their recorded names. A value that depends on a
    leaf with a possible gradient is computed again, too. Other values, such as a mask of positions, are used as recorded.
    """
    given = leaves or {}
    inside = dependents(body.mirror, site.match, projections(site) if leaves is None else ())
    made = made_of((name for name in given if _is_floating(body.named[name].meta.get("val"))), site, body)
    last_use = {n: node for node in inside for n in (node, *node.all_input_nodes)}
    known: dict[fx.Node, Any] = {}

    def value(node: fx.Node) -> Any:
        if node not in known:
            known[node] = found(node)
        return known[node]

    def found(node: fx.Node) -> Any:
        name = body.names.get(node)
        if name is not None and name in given:
            return given[name]
        if node in made:
            require_computable(node)
            if mutation.written_between(body.mirror, node, node, site.match.out) is not None:
                raise NoValueError(f"{node.name} is written to in place before the site reads it")
            return call(node)
        x = values.mirror(node)
        # A copy: writes in place must not reach the model's own values.
        return in_dtype(x, dtype).clone() if isinstance(x, torch.Tensor) else x

    def call(node: fx.Node) -> Any:
        x = values.call(node, value, dtype=dtype)
        return x if noise is None else noise.on_step(x, node.meta.get("val"), map(known.get, node.all_input_nodes))

    result = None
    for node in inside:
        if not mutation.writes(node):
            require_computable(node)
        elif not isinstance(node.target, torch._ops.OpOverload):
            raise NoValueError(f"{node.name} can't be run by itself")
        result = known[node] = call(node)
        for used in {node, *node.all_input_nodes}:
            if last_use[used] is node:
                known.pop(used, None)
    if not isinstance(result, torch.Tensor):
        raise NoValueError("the output is no tensor")
    return in_dtype(result, dtype)


def _is_floating(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def in_dtype(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return x if dtype is None or not x.is_floating_point() else x.to(dtype)
