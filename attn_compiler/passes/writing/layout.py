"""Copies of operands whose strides the chosen kernel can't read: planned with bytes and reason. Nothing else is moved."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import fx

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.base import UNTOUCHED, LayoutDemand
from attn_compiler.passes.graph import axes, faults, views
from attn_compiler.passes.graph.site import Match
from attn_compiler.passes.graph.unit import FoundSites, Unit
from attn_compiler.passes.writing.select import leave_alone
from attn_compiler.reasons.decisions import Copy
from attn_compiler.spec.attention import AttentionSpec, TensorSpec

aten = torch.ops.aten
#: ops whose result has its input's strides on a CPU, while PyTorch's tracing says that it is contiguous (torch 2.11 to 2.15)
_TOLD_WRONG = frozenset({aten.roll.default, aten.channel_shuffle.default})


def choose_copies(unit: Unit, found: FoundSites) -> None:
    """Fill in the copies of every site that is going to be lowered."""
    for site in found.sites:
        if site.spec is None or site.decision is None or site.decision.lowering == UNTOUCHED:
            continue
        unit.log.current = site.module
        with faults.confined(unit.log, "layout", site.module) as attempt:
            demand = by_name(site.decision.lowering).demand(site.spec)
            site.copies.extend(needed(site.spec, demand))
            site.copies.extend(_of_zeros(site.match, site.spec))
            # Inductor writes results in the strides that tracing says.
            if unit.options.inner != "inductor" and site.spec.device == "cpu":
                site.copies.extend(_of_told_wrong(site.match, site.spec, {copy.operand for copy in site.copies}))
        if attempt.reason is not None:
            leave_alone(site, attempt.reason)


def needed(spec: AttentionSpec, demand: LayoutDemand) -> list[Copy]:
    """Return the copies that a demand asks for: contiguous BHSD in place of strides that the kernel can't read."""
    copies = []
    for name, tensor in (("q", spec.q), ("k", spec.k), ("v", spec.v)):
        why = demand.broken_by(tensor)
        if why is not None:
            copies.append(Copy(operand=name, bytes=num_bytes(tensor), why=why))
    return copies


def _of_zeros(match: Match, spec: AttentionSpec) -> list[Copy]:
    """Return the copies with zeros behind each head's numbers, which `select` decided on."""
    of_qk, of_v = (axes.dim_size(dim) for dim in (match.axes.head_dim_qk, match.axes.head_dim_v))
    why = "the kernel takes no head dim of {}; zeros are added up to {}, which change no result"
    return [
        Copy(operand=name, bytes=num_bytes(tensor), why=why.format(own, tensor.shape[-1]))
        for name, tensor, own in (("q", spec.q, of_qk), ("k", spec.k, of_qk), ("v", spec.v, of_v))
        if own.is_Integer and own != tensor.shape[-1]
    ]


def _of_told_wrong(match: Match, spec: AttentionSpec, copied: Collection[str]) -> list[Copy]:
    why = "the op that made it may leave other strides than PyTorch's tracing says"
    names = [name for name in ("q", "k", "v") if name in told_wrong(match) and name not in copied]
    return [Copy(operand=name, bytes=num_bytes(getattr(spec, name)), why=why) for name in names]


def told_wrong(match: Match) -> frozenset[str]:
    """Return which of q, k and v may have other strides than PyTorch's tracing says."""
    return frozenset(name for name in ("q", "k", "v") if _maker(getattr(match, name).root).target in _TOLD_WRONG)


def _maker(node: fx.Node) -> fx.Node:
    """Return the node that made the tensor under a chain of views."""
    while views.is_view(node):
        node = views.source(node)
    return node


def num_bytes(tensor: TensorSpec) -> int | None:
    """Return the size of a whole copy of the tensor; None if a dimension is symbolic."""
    sizes = [s for s in tensor.shape if isinstance(s, int)]
    element = torch.empty((), dtype=getattr(torch, tensor.dtype), device="meta").element_size()
    return math.prod(sizes) * element if len(sizes) == len(tensor.shape) else None
