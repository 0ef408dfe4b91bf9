"""Conversion of a mask tensor that was proved to be a diagonal to the causal flag of PyTorch's kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from attn_compiler.lowerings.shared.parts import site_parts as parts
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from attn_compiler.lowerings.shared.parts.site_parts import Parts
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.masks import Alignment, Causal, Flag, MaskSpec


def as_flag(spec: AttentionSpec) -> AttentionSpec | None:
    """Return the same site with a causal flag in place of its mask tensor; None if it has none, or one that is no plain diagonal.

    Recovery does so itself where there are as many queries as keys. Elsewhere the kernel decides in which corner the diagonal starts.
    """
    band = parts.parts(spec).band
    if spec.mask.dense is None or spec.score.bias is not None or band is None:
        return None
    if parts.parts(spec) != Parts(band=Band(right=0, from_end=band.from_end)):
        return None
    corner = Alignment.BOTTOM_RIGHT if band.from_end else Alignment.TOP_LEFT
    mask = MaskSpec(kinds=(Causal(alignment=corner),), flag=Flag.READ, out_of_reach=spec.mask.out_of_reach)
    return dataclasses.replace(spec, mask=mask)


def with_flag(spec: AttentionSpec, refused: Callable[[AttentionSpec], list[Reason]]) -> AttentionSpec:
    """Return the site with a flag for a mask tensor that means the same, if the kernel takes it. refused: its reasons against a site."""
    flagged = as_flag(spec)
    return spec if flagged is None or refused(flagged) else flagged
