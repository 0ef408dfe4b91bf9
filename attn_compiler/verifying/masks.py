"""Comparison of the recovered mask with the model's own: the condition at every (b, h, q, k), and the model's masking tensors.

No difference is allowed. If the condition holds, the model must allow the pair (True, or 0 added); otherwise it must mask it (False, or at
most float16's lowest number added). A number between is neither. With a bias, such a number belongs to the bias (scores.py), and the bias
itself may mask a pair, too.
"""

from __future__ import annotations

import math

import torch

from attn_compiler import index_expr as ix
from attn_compiler.passes.graph.site import Site
from attn_compiler.passes.matching.patterns.score_steps import MASKED_BELOW, STILL_MASKED_BELOW
from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.verifying import pairs, scores
from attn_compiler.verifying.comparing import Compared
from attn_compiler.verifying.pairs import ALLOWED, BIASED_MASKED_BELOW, MASKED, NEITHER, Own, Recovered, Slice
from attn_compiler.verifying.values import NoValueError, Values

_WORDS = {MASKED: "masked out", ALLOWED: "allowed"}


def read(site: Site, values: Values) -> None:
    """Read the inputs of `check_mask`. Raises NoValueError."""
    if site.condition is None:
        mask = site.spec.mask if site.spec is not None else None
        raise NoValueError((mask.reason if mask is not None else None) or "the mask was not read")
    biases = [(kind.summand, site.score_loads) for kind in pairs.biases(site)]
    pairs.read(site, [(site.condition, site.loads), *biases], values)


def check_mask(site: Site, values: Values) -> Compared:
    """Compare slice by slice. Raises VerificationMismatch, or NoValueError."""
    condition = site.condition
    if condition is None:
        raise NoValueError("the mask was not read")
    words = {"what": "recovered mask", "formula": formula(site), "gives": "a mask", "allowed": "no difference"}
    mask = Recovered.from_site(site, values, [condition], site.loads, **words)
    mixed = bool(pairs.biases(site))
    for at in mask.slices():
        expected = _effects([one.at(at) for one in mask.own], mixed=mixed)
        got = mask.on(condition, at, expected.device).to(torch.int8)
        differs = (expected != got).broadcast_to(1, 1, at.end - at.first, mask.sizes[3])
        if mixed and bool(differs.any()):
            differs = differs & ~_masked_by(scores.recovered(site, values), at, expected)
        if bool(differs.any()):
            raise _mismatch(mask, at, expected, differs)
    return Compared(elements=math.prod(mask.sizes))


def _effects(own: list[Own], *, mixed: bool) -> torch.Tensor:
    """Return the model's effect on each pair of a slice. mixed: biases are added besides the mask, so any other number allows."""
    found = pairs.combined([pairs.effects(one, BIASED_MASKED_BELOW if mixed else MASKED_BELOW) for one in own])
    return torch.where(found == NEITHER, ALLOWED, found).to(torch.int8) if mixed else found


def _masked_by(bias: Recovered, at: Slice, expected: torch.Tensor) -> torch.Tensor:
    """Return the pairs that the model masks and whose bias is as low as a mask: an unread bias may be a mask, too."""
    found = torch.zeros((), dtype=torch.bool, device=expected.device)
    for kind in pairs.biases(bias.site):
        found = found | (bias.on(kind.summand, at, expected.device) <= STILL_MASKED_BELOW)
    return (expected == MASKED) & found


def formula(site: Site) -> str:
    """Return the recovered condition in words."""
    return "(not read)" if site.condition is None else ix.text(site.condition)


def _mismatch(mask: Recovered, at: Slice, expected: torch.Tensor, differs: torch.Tensor) -> VerificationMismatch:
    query, key = (int(i) for i in differs[0, 0].nonzero()[0])
    effect = int(expected.expand_as(differs)[0, 0, query, key])
    recovered = {MASKED: "allowed", ALLOWED: "masked out"}.get(effect, "a condition, which allows or masks out")
    known = _WORDS.get(effect, "neither allowed nor masked out")
    return mask.mismatch(at, query, key, differs, expected=known, observed=recovered)
