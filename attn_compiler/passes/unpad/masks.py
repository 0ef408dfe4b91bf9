"""The keys that all attentions of a graph leave out, one mask over (batch row, position) proved at each site; and the pairs left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Load, Size
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.passes.graph.site import Site
from attn_compiler.passes.unpad import scores
from attn_compiler.passes.unpad.forms import KeepsPadding
from attn_compiler.passes.unpad.scores import PackedScores
from attn_compiler.reasons.codes import Code
from attn_compiler.spec import masks
from attn_compiler.spec.attention import AttentionSpec, Dim
from attn_compiler.spec.masks import Causal, KeyPadding, MaskKind, SlidingWindow

_RULE = "all attentions leave out the same keys as padding, and nothing else but by position"


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """The mask of padding. tensor: (B, S). negated: it is 0 where a token is real.

    is_asked: attentions leave out that padding only if the mask is 0 or 1 everywhere, which only the data tells (`mask == 1`).
    is_absent: there is no padding. `tensor` is any of (B, S).
    """

    tensor: Version
    negated: bool
    is_asked: bool = False
    is_absent: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionBand:
    """The pairs that positions alone allow a site: causal, and a window."""

    causal: bool = False
    left: int | None = None
    right: int | None = None

    @property
    def counts_positions(self) -> bool:
        """Return whether the distance between two tokens counts, and not only which comes first."""
        return self.left is not None or self.right is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedPairs:
    """A site's pairs of packed tokens of one row.

    band: the pairs that take part.
    scores: the additions to their scores; None for nothing.
    """

    band: PositionBand
    scores: PackedScores | None

    @property
    def count_positions(self) -> bool:
        """Return whether the distance between two tokens counts, and not only which comes first."""
        return self.band.counts_positions or (self.scores is not None and self.scores.counts_positions)


def padding_and_pairs(sites: Sequence[Site], absent: Padding | None = None) -> tuple[Padding, list[PackedPairs]]:
    """Return the padding of a graph, and each site's pairs of tokens. absent: the padding if there is none. Raises KeepsPadding."""
    found: Padding | None = None
    pairs = []
    for site in sites:
        spec = site.spec
        if spec is None:
            raise ValueError(f"the site at {site.module} has no spec")
        if site.match.anchor.target is not torch.ops.aten.scaled_dot_product_attention.default:
            remedy = 'load the model with attn_implementation="sdpa"'
            raise _refused(site, "an attention that is no call of scaled_dot_product_attention", remedy)
        _check_reading(site, spec)
        padding, band = _masks(site, spec, absent)
        if found is not None and (padding.tensor, padding.negated) != (found.tensor, found.negated):
            raise _refused(site, "the mask of another layer is another tensor")
        found = padding if found is None or padding.is_asked else found
        pairs.append(PackedPairs(band=band, scores=scores.packed_scores(site, spec)))
    if found is None:
        raise KeepsPadding(Code.PADDING_MASK, "the graph has an attention that was understood", "none")
    return found, pairs


def _refused(site: Site, observed: str, remedy: str | None = None) -> KeepsPadding:
    return KeepsPadding(Code.PADDING_MASK, _RULE, observed, at=site.match.out, remedy=remedy)


def _check_reading(site: Site, spec: AttentionSpec) -> None:
    """Raise KeepsPadding if more than the output of the attention is read, or if it reads stored keys."""
    if spec.returns_weights:
        raise _refused(site, "the attention weights are read", "call the model without output_attentions")
    if spec.lse != "unread":
        raise _refused(site, "the logsumexp of the scores is read")
    if spec.stored is not None:
        raise _refused(site, "k and v come from a cache in FP8")


def _masks(site: Site, spec: AttentionSpec, absent: Padding | None) -> tuple[Padding, PositionBand]:
    if spec.mask.reason is not None:
        raise _refused(site, f"the mask was not understood: {spec.mask.reason}")
    kinds = spec.mask.kinds
    pads = [kind for kind in kinds if isinstance(kind, KeyPadding)]
    if absent is not None and not pads:
        return absent, _band(site, list(kinds))
    if len(pads) != 1:
        raise _refused(site, f"the mask is {spec.mask.words}", "pass attention_mask" if not pads else None)
    return _padding(site, pads[0], spec.batch), _band(site, [kind for kind in kinds if kind is not pads[0]])


def _padding(site: Site, kind: KeyPadding, batch: Dim) -> Padding:
    load, negated = ix.nonzero(kind.condition)
    is_asked = not isinstance(load, Load)
    place = (Const(0) if batch == 1 else Index("b"), Index("k"))
    if is_asked:
        load, negated = _of_zero_or_one(kind.condition, place)
    if not isinstance(load, Load) or load.at != place:
        raise _refused(site, f"padding is {kind.words}", "mask padding by one tensor over (batch row, position)")
    version = site.loads[load.tensor]
    if version.since is not None or version.until is not None:
        raise _refused(site, f"{load.tensor} is written in place")
    return Padding(tensor=version, negated=negated, is_asked=is_asked)


def _of_zero_or_one(condition: Expr, place: tuple[Expr, Expr]) -> tuple[Expr, bool]:
    """Read a condition as `ix.nonzero`, if its one element, at `place`, is 0 or 1. A condition on more is returned itself."""
    elements = {x for x in ix.loads(condition) if x.at == place}
    found = ix.ordered(condition, lambda x: () if x in elements else ix.parts(x))
    others = [x for x in found if isinstance(x, (Index, Size, Load)) and x not in elements]
    if len(elements) != 1 or others:
        return condition, False
    for_0, for_1 = (_is_met(condition, number) for number in (0, 1))
    return (condition, False) if for_0 == for_1 else (elements.pop(), for_0)


def _is_met(condition: Expr, number: int) -> bool:
    return bool(ix.evaluate(condition, {"b": 0, "k": 0}, lambda _, __: number))


def _band(site: Site, kinds: list[MaskKind]) -> PositionBand:
    band = PositionBand()
    for kind in kinds:
        match kind:
            case Causal(alignment=masks.Alignment.TOP_LEFT):
                band = PositionBand(causal=True, left=band.left, right=band.right)
            case SlidingWindow(left=left, right=right) if not band.counts_positions:
                band = PositionBand(causal=band.causal, left=left, right=right)
            case _:
                raise _refused(site, f"the mask is {kind.words}, too")
    return band
