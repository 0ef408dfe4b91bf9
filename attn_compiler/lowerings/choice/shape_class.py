"""Properties of a spec that the choice of a kernel depends on: its sizes, and the class of its mask.

An unknown length counts as `ANY_LENGTH`, or the nearest length that guards allow. The graph serves calls of every length, so the choice is
right for long ones, where most time goes. Measured orders change little below. Of the lowerings that need no further package, the chosen
one takes at most 1.2 times as long as the fastest one at any shorter length that was measured (tests/lowerings/choice/test_shape_class.py).
That number never decides whether a lowering takes a site.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from attn_compiler.lowerings.shared.parts import site_parts
from attn_compiler.spec import dims
from attn_compiler.spec.attention import AttentionSpec, Dim
from attn_compiler.spec.masks import Causal, KeyBound, SlidingWindow

#: The first that applies. "added": a bias of any kind. "tensor": pairs that only run-time tensors give. "lengths": numbers of keys for
#: batch rows and, at most, a band. "padding": another interval of keys, or truth values of them, from run-time tensors. "sinks".
#: "softcap". "window": a band that is no plain diagonal. "causal". "full".
Mask = Literal["added", "tensor", "lengths", "padding", "sinks", "softcap", "window", "causal", "full"]
MASKS: tuple[Mask, ...] = get_args(Mask)
#: The band that positions alone give, whatever other conditions the mask has.
Band = Literal["window", "causal", "full"]
BANDS: tuple[Band, ...] = get_args(Band)
#: stands for a length that is not known
ANY_LENGTH = 4096
#: masks that `sort_of_mask` classes by their band
_BY_BAND: tuple[Mask, ...] = ("sinks", "softcap")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeClass:
    """Class of a spec. head_dim: the larger one. seqlens: the smaller and the larger one, or their stand-ins. is_any: a length is unknown.
    grouped: k and v have fewer heads. elements: of q. None: unknown."""

    mask: Mask
    band: Band
    head_dim: int | None
    seqlens: tuple[int, int]
    is_any: bool
    grouped: bool
    elements: int | None


@functools.lru_cache(maxsize=1024)
def classify(spec: AttentionSpec) -> ShapeClass:
    """Return the class of a spec, whatever kernels there are for it."""
    queries, keys = (chosen_for(spec, size) for size in (spec.seqlen_q, spec.seqlen_kv))
    head_dims = spec.head_dim_qk, spec.head_dim_v
    known = [size for size in head_dims if isinstance(size, int)]
    return ShapeClass(
        mask=_mask(spec),
        band=_band(spec),
        head_dim=max(known) if len(known) == len(head_dims) else None,
        seqlens=(min(queries, keys), max(queries, keys)),
        is_any=not (isinstance(spec.seqlen_q, int) and isinstance(spec.seqlen_kv, int)),
        grouped=spec.is_gqa,
        elements=_product((spec.batch, spec.num_heads_q, queries, spec.head_dim_qk)),
    )


def chosen_for(spec: AttentionSpec, length: Dim) -> int:
    """Return a length of a spec, or the number that stands for an unknown one."""
    least, most = dims.range_of(spec, length)
    return max(least, ANY_LENGTH if most is None else min(ANY_LENGTH, most))


def words_of_any(spec: AttentionSpec) -> str | None:
    """Describe lengths that are not known, for people; None if all are known."""
    symbolic = dict.fromkeys(size for size in (spec.seqlen_q, spec.seqlen_kv) if isinstance(size, str))
    if not symbolic:
        return None
    found = {f"chosen as for {chosen_for(spec, size)}{_words_of_range(spec, size)}" for size in symbolic}
    return f"any, {' and '.join(sorted(found))}"


def _words_of_range(spec: AttentionSpec, size: str) -> str:
    least, most = dims.range_of(spec, size)
    held = [
        *([f"at least {least}"] if least > dims.at_least(size) else []),
        *([] if most is None else [f"at most {most}"]),
    ]
    return f" (guards: {', '.join(held)})" if held else ""


def sort_of_mask(spec: AttentionSpec) -> str:
    """Return the class of a mask in rows measured on Hopper's kernels.

    Intervals of any length have their blocks ordered by length, as documents have. Score changes cost all of these kernels the same work:
    rows of their band apply to them.
    """
    if "rows" in site_parts.parts(spec).kinds:
        return "intervals"
    shape = classify(spec)
    return shape.band if shape.mask in _BY_BAND else shape.mask


def _mask(spec: AttentionSpec) -> Mask:
    kinds = site_parts.parts(spec).kinds
    if kinds & site_parts.ADDED:
        return "added"
    if kinds & {"documents", "mask"}:
        return "tensor"
    if "keys" in kinds:
        return "padding"
    if kinds & {"lengths", "rows"}:
        bounds = [kind for kind in spec.mask.kinds if not isinstance(kind, Causal | SlidingWindow)]
        are_lengths = all(isinstance(kind, KeyBound) and kind.side == "last" and kind.is_padding for kind in bounds)
        return "lengths" if are_lengths else "padding"
    if spec.score.sinks is not None:
        return "sinks"
    if spec.score.softcap is not None:
        return "softcap"
    return _band(spec)


def _band(spec: AttentionSpec) -> Band:
    band = site_parts.parts(spec).band
    if band is None:
        return "full"
    return "causal" if band.left is None and band.right == 0 else "window"


def _product(sizes: Sequence[Dim]) -> int | None:
    known = [size for size in sizes if isinstance(size, int)]
    return math.prod(known) if len(known) == len(sizes) else None
