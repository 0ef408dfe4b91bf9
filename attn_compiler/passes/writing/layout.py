"""Where the chosen kernel can't read an operand's strides, plan a copy: with its bytes and why. Nothing else is moved."""

from __future__ import annotations

import math

import torch

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.base import UNTOUCHED, LayoutDemand
from attn_compiler.passes.graph import faults
from attn_compiler.passes.graph.unit import FoundSites, Unit
from attn_compiler.passes.writing.select import leave_alone
from attn_compiler.reasons.decisions import Copy
from attn_compiler.spec.attention import AttentionSpec, TensorSpec


def choose_copies(unit: Unit, found: FoundSites) -> None:
    """Fill in the copies of every site that is going to be lowered."""
    for site in found.sites:
        if site.spec is None or site.decision is None or site.decision.lowering == UNTOUCHED:
            continue
        unit.log.current = site.module
        with faults.confined(unit.log, "layout", site.module) as attempt:
            demand = by_name(site.decision.lowering).demand(site.spec)
            site.copies.extend(needed(site.spec, demand))
        if attempt.reason is not None:
            leave_alone(site, attempt.reason)


def needed(spec: AttentionSpec, demand: LayoutDemand) -> list[Copy]:
    """The copies that a demand asks for: contiguous BHSD in place of strides that the kernel can't read."""
    copies = []
    for name, tensor in (("q", spec.q), ("k", spec.k), ("v", spec.v)):
        why = demand.broken_by(tensor)
        if why is not None:
            copies.append(Copy(operand=name, bytes=num_bytes(tensor), why=why))
    return copies


def num_bytes(tensor: TensorSpec) -> int | None:
    """Size of the tensor when it is copied whole; None if a dimension is symbolic."""
    sizes = [s for s in tensor.shape if isinstance(s, int)]
    element = torch.empty((), dtype=getattr(torch, tensor.dtype), device="meta").element_size()
    return math.prod(sizes) * element if len(sizes) == len(tensor.shape) else None
