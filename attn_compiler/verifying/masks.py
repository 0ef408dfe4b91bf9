"""The recovered mask against the model's own: the condition at every (b, h, q, k), and the tensors that the model masks with.

What is allowed: no difference at all. Where the condition holds, the model must let the pair through (True, or 0 added), and
where it does not, the model must mask it (False, or at most float16's lowest number added). A number between is neither.
Where a bias is added besides, such a number is what is added (scores.py), and a pair may also be masked by the bias itself.
"""

from __future__ import annotations

import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Expr
from attn_compiler.passes.graph.site import Site
from attn_compiler.passes.matching.patterns.score_steps import MASKED_BELOW, STILL_MASKED_BELOW
from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.verifying import pairs
from attn_compiler.verifying.pairs import ALLOWED, BIASED_MASKED_BELOW, MASKED, NEITHER, Own, Slice
from attn_compiler.verifying.values import Key, NoValueError, Values

_WORDS = {MASKED: "masked out", ALLOWED: "allowed"}


def needs(site: Site, values: Values) -> set[Key]:
    """What has to be recorded for `check`. Raises NoValueError where it can't be."""
    if site.condition is None:
        mask = site.spec.mask if site.spec is not None else None
        raise NoValueError((mask.reason if mask is not None else None) or "the mask was not read")
    return pairs.needs(
        site, [(site.condition, site.loads), *((kind.summand, site.score_loads) for kind in pairs.biases(site))], values
    )


def check(site: Site, values: Values) -> int:
    """Compare, slice by slice; returns how many pairs were. Raises VerificationMismatch, or NoValueError."""
    condition = site.condition
    if condition is None:
        raise NoValueError("the mask was not read")
    own = pairs.own(site, values)
    if not own:
        raise NoValueError("the model masks with no tensor")
    tensors = pairs.loaded([condition], site.loads, values)
    sizes = pairs.varying([condition], own, pairs.shape(site.match, values))
    for at in pairs.slices(sizes):
        expected = _effects([one.at(at) for one in own], mixed=bool(pairs.biases(site)))
        try:
            got = _evaluated(condition, at, sizes[3], values, tensors, expected.device)
        except (IndexError, ZeroDivisionError) as error:
            raise _undefined(site, at, error) from error
        differs = (expected != got).broadcast_to(1, 1, at.end - at.first, sizes[3])
        if bool(differs.any()) and pairs.biases(site):
            differs = differs & ~_masked_by_bias(site, at, sizes[3], values, expected)
        if bool(differs.any()):
            raise _mismatch(site, at, expected, differs, own)
    return sizes[0] * sizes[1] * sizes[2] * sizes[3]


def _effects(own: list[Own], *, mixed: bool) -> torch.Tensor:
    """What the model does with the pairs of a slice. mixed: something is added besides the mask, so any number lets through."""
    found = pairs.together([pairs.effects(one, BIASED_MASKED_BELOW if mixed else MASKED_BELOW) for one in own])
    return torch.where(found == NEITHER, ALLOWED, found).to(torch.int8) if mixed else found


def _evaluated(
    condition: Expr,
    at: Slice,
    keys: int,
    values: Values,
    tensors: dict[str, torch.Tensor],
    device: torch.device,
) -> torch.Tensor:
    """The condition on a slice: int8, MASKED or ALLOWED."""
    return pairs.evaluated(condition, at, keys, values, tensors, device).to(torch.int8)


def _masked_by_bias(site: Site, at: Slice, keys: int, values: Values, expected: torch.Tensor) -> torch.Tensor:
    """The pairs that the model masks, and a bias holds a number that does so: a ready-made one may be a mask too."""
    found = torch.zeros((), dtype=torch.bool, device=expected.device)
    for kind in pairs.biases(site):
        tensors = pairs.loaded([kind.summand], site.score_loads, values)
        try:
            added = pairs.evaluated(kind.summand, at, keys, values, tensors, expected.device)
        except (IndexError, ZeroDivisionError):
            # The check of what is added says so.
            continue
        found = found | (added <= STILL_MASKED_BELOW)
    return (expected == MASKED) & found


def _undefined(site: Site, at: Slice, error: Exception) -> VerificationMismatch:
    return VerificationMismatch(
        site=site.module,
        what="recovered mask",
        formula=formula(site),
        index=str(at),
        expected="a mask",
        observed=f"a formula that has no value: {error}",
        allowed="no difference",
        differing="at least one pair",
    )


def formula(site: Site) -> str:
    """The recovered condition in words."""
    return "(not read)" if site.condition is None else ix.text(site.condition)


def _mismatch(
    site: Site, at: Slice, expected: torch.Tensor, differs: torch.Tensor, own: list[Own]
) -> VerificationMismatch:
    query, key = (int(i) for i in differs[0, 0].nonzero()[0])
    place = at.place(query, key)
    effect = int(expected.expand_as(differs)[0, 0, query, key])
    recovered = ALLOWED if effect == MASKED else MASKED if effect == ALLOWED else None
    return VerificationMismatch(
        site=site.module,
        what="recovered mask",
        formula=formula(site),
        index=pairs.index(place),
        expected=f"{_WORDS.get(effect, 'neither allowed nor masked out')} ({pairs.elements(own, place)})",
        observed=_WORDS[recovered] if recovered is not None else "a condition, which allows or masks out",
        allowed="no difference",
        differing=f"{int(differs.sum())} of {differs.numel()} pairs of its slice",
    )
