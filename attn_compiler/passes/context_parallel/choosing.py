"""The method by which the queries of one attention meet keys of other ranks: the user's, or the one that sends the least."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attn_compiler.context_parallel import ContextParallel
from attn_compiler.context_parallel.halo import most_sent
from attn_compiler.context_parallel.layout import Layout
from attn_compiler.passes.context_parallel import sites
from attn_compiler.passes.context_parallel.exchanging import GraphLayout
from attn_compiler.passes.context_parallel.places import CannotShard
from attn_compiler.passes.graph.site import Site
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.dtypes import BYTES
from attn_compiler.spec.target import Target

#: the architecture on which kernels were measured to be as fast with a rank's intervals of keys as with a plain diagonal
_SM = 90
#: the number of transfers, without and with a backward: of keys and values (or their gradients) in a gather, of all operands in an exchange
#: of heads
_GATHERS, _EXCHANGES = (1, 3), (1, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodChoice:
    """The chosen method. method: "all_gather", "all_to_all" or "ring". why: the reason of "auto"; None where the user named the method."""

    method: str
    why: str | None = None


def choice(site: Site, spec: AttentionSpec, cp: ContextParallel, layout: GraphLayout, target: Target) -> MethodChoice:
    """Choose the method. Raises CannotShard where the user's method is not possible.

    "auto" takes a halo where it sends less than all else. It exchanges heads where they can be shared out, which leaves each attention as
    it was. It gathers where that sends less and the mask depends on positions alone. Where heads can't be shared out it gathers up to
    `gather_limit`, and beyond takes keys and values of one rank at a time.
    """
    heads = (spec.num_heads_q, spec.num_heads_kv)
    divides = all(isinstance(n, int) and n % cp.size == 0 for n in heads)
    if cp.method == "all_to_all" and not divides:
        raise CannotShard(
            "all_to_all gives each rank as many heads of q, and of k and v",
            f"{heads[0]} and {heads[1]} heads for {cp.size} ranks",
            at=site.match.out,
            remedy='use method="all_gather" or "auto"',
        )
    if cp.method != "auto":
        return MethodChoice(method=cp.method)
    gathered = gathered_bytes(spec, cp.size)
    if divides:
        exchanged = exchanged_bytes(spec, cp.size)
        near = halo_bytes(site, spec, layout)
        if near is not None and near < exchanged:
            return MethodChoice(method="all_gather", why=f"to exchange heads would send {exchanged} bytes")
        if target.sm == _SM and gathered <= cp.gather_limit and _says_less(site, spec, cp.size):
            return MethodChoice(
                method="all_gather", why=f"to exchange heads would send {exchanged} bytes, and in a backward as many"
            )
        return MethodChoice(method="all_to_all")
    if gathered > cp.gather_limit:
        return MethodChoice(
            method="ring", why=f"keys and values of all ranks would be {gathered} bytes, more than gather_limit"
        )
    return MethodChoice(method="all_gather")


def _says_less(site: Site, spec: AttentionSpec, size: int) -> bool:
    """Return whether gathering sends less than exchanging heads, under a mask of positions alone, which kernels take as intervals."""
    reads = site.loads or site.score_loads or spec.score.proved or spec.score.bias is not None
    sent = (size - 1) * _bytes(spec.k, spec.v) * _GATHERS[spec.needs_grad]
    return not reads and sent < exchanged_bytes(spec, size) * _EXCHANGES[spec.needs_grad]


def gathered_bytes(spec: AttentionSpec, size: int) -> int:
    """Return the bytes of all keys and values of one attention, which each rank would have; 0 where sizes are symbols."""
    return size * _bytes(spec.k, spec.v)


def exchanged_bytes(spec: AttentionSpec, size: int) -> int:
    """Return the bytes of q, k, v and the output that a rank sends to exchange heads for positions; 0 where sizes are symbols."""
    return (2 * _bytes(spec.q) + _bytes(spec.k, spec.v)) * (size - 1) // size


def halo_bytes(site: Site, spec: AttentionSpec, layout: GraphLayout) -> int | None:
    """Return the most bytes of k and v that a rank sends for a halo; None where the mask lets a query see more than near keys."""
    if not isinstance(spec.seqlen_q, int):
        return None
    found = sites.halo_of(site, spec, layout, "all_gather")
    if found is None:
        return None
    lay = Layout(size=layout.size, balanced=layout.is_balanced)
    return most_sent(lay, found) * _bytes(spec.k, spec.v) // spec.seqlen_q


def _bytes(*tensors: TensorSpec) -> int:
    if any(not isinstance(n, int) for x in tensors for n in x.shape):
        return 0
    return sum(math.prod(map(int, x.shape)) * BYTES[x.dtype] for x in tensors)
