"""Lowerings whose kernels apply the parts of a mask, and read a tensor for what is no part."""

from __future__ import annotations

from attn_compiler.lowerings.base import Lowering
from attn_compiler.lowerings.shared.parts import site_parts
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target


class ByParts(Lowering):
    """A family that inherits it names the parts that its kernels take in its `Takes`."""

    def reads_pairs(self, spec: AttentionSpec, target: Target) -> bool:
        return spec.has_pairs and bool(site_parts.parts(spec).kinds & {"mask", "bias"})
