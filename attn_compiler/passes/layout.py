"""Where the chosen kernel can't read an operand's strides, plan a copy: with its bytes and why. Nothing else is moved."""

from __future__ import annotations

import math

import torch

from attn_compiler.lowerings import by_name, dims
from attn_compiler.lowerings.base import LayoutDemand
from attn_compiler.passes.mirror import Mirror
from attn_compiler.passes.select import UNTOUCHED
from attn_compiler.passes.unit import Unit
from attn_compiler.report import Copy
from attn_compiler.spec import AttentionSpec, TensorSpec


def run(unit: Unit, mirror: Mirror) -> None:
    """Fill in the copies of every site that is going to be lowered."""
    for site in unit.sites:
        if site.spec is not None and site.decision is not None and site.decision.lowering != UNTOUCHED:
            demand = by_name(site.decision.lowering).demand(site.spec)
            site.copies.extend(needed(site.spec, demand))


def needed(spec: AttentionSpec, demand: LayoutDemand) -> list[Copy]:
    """The copies that a demand asks for: contiguous BHSD in place of strides that the kernel can't read."""
    copies = []
    for name, tensor in (("q", spec.q), ("k", spec.k), ("v", spec.v)):
        why = broken(tensor, demand)
        if why is not None:
            copies.append(Copy(operand=name, bytes=num_bytes(tensor), why=why))
    return copies


def broken(tensor: TensorSpec, demand: LayoutDemand) -> str | None:
    """What the kernel can't read in these strides; None if it can read them. An axis of size one has no stride to speak of."""
    strides = [(stride, size) for stride, size in zip(tensor.strides, tensor.shape, strict=True) if size != 1]
    last_size, last = tensor.shape[-1], tensor.strides[-1]
    if demand.last_stride_one and last_size != 1 and last != 1:
        return f"the kernel reads a head's elements side by side; their stride is {last}"
    if not demand.zero_strides and any(stride == 0 for stride, _ in strides):
        return "the kernel can't read a repeated (stride 0) axis"
    element = torch.empty((), dtype=getattr(torch, tensor.dtype), device="meta").element_size()
    step = math.lcm(demand.alignment, element) // element
    for stride, _ in strides:
        if step > 1 and stride != last and not dims.is_multiple(stride, step):
            return f"the kernel needs strides that are multiples of {demand.alignment} bytes; one is {stride} elements"
    return None


def num_bytes(tensor: TensorSpec) -> int | None:
    """Size of the tensor when it is copied whole; None if a dimension is symbolic."""
    sizes = [s for s in tensor.shape if isinstance(s, int)]
    element = torch.empty((), dtype=getattr(torch, tensor.dtype), device="meta").element_size()
    return math.prod(sizes) * element if len(sizes) == len(tensor.shape) else None
