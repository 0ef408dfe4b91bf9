"""What the kernels for Hopper can't do, as reasons."""

from __future__ import annotations

from attn_compiler.codes import Code
from attn_compiler.decisions import Reason
from attn_compiler.lowerings.hopper.takes import TAKES
from attn_compiler.lowerings.shared import kernel_limits, takes
from attn_compiler.lowerings.shared import limits as shared_limits
from attn_compiler.spec import AttentionSpec
from attn_compiler.target import Target

#: what float32 holds in full, with room for a factor of a few units
_LEAST_FACTOR, _MOST_FACTOR = 1e-30, 1e30
_REMEDY = "leave the choice to the compiler, or give lowering='triton', which takes that"
_WORDS = {"mask": "a dense mask", "bias": "a dense bias", "distances": "a bias by distance"}


def check(spec: AttentionSpec, target: Target) -> list[Reason]:
    """Every reason against the spec on that machine."""
    machine = check_machine(target) or shared_limits.check_device(spec, target.device)
    if machine:
        return machine
    return [
        *takes.refused(TAKES, spec),
        *kernel_limits.check_site(spec, target),
        *_check_parts(spec),
        *_check_numbers(spec),
    ]


def check_machine(target: Target) -> list[Reason]:
    """Hopper, and a Triton whose Gluon is known."""
    return kernel_limits.check_gluon(target, TAKES)


def _check_parts(spec: AttentionSpec) -> list[Reason]:
    beyond = TAKES.beyond(spec)
    if not beyond:
        return []
    rule = "the kernel knows bands, intervals, key masks, documents, slopes, a softcap and sinks"
    return [
        Reason(
            code=Code.MASK_KIND, rule=rule, observed=", ".join(_WORDS[part] for part in sorted(beyond)), remedy=_REMEDY
        )
    ]


def _check_numbers(spec: AttentionSpec) -> list[Reason]:
    """Beside a masked key, whose score is -inf, a factor of 0 or of infinity is NaN."""
    score = spec.score
    reasons = []
    if 0 < score.scale < _LEAST_FACTOR:
        reasons.append(
            Reason(code=Code.SCALE, rule=f"the scale is at least {_LEAST_FACTOR:g}", observed=f"{score.scale:g}")
        )
    if score.softcap is not None and not score.scale / score.softcap >= _LEAST_FACTOR:
        rule = f"the scale over the softcap is at least {_LEAST_FACTOR:g}"
        reasons.append(Reason(code=Code.SCALE, rule=rule, observed=f"{score.scale:g}, {score.softcap:g}"))
    if score.softcap is not None and score.softcap > _MOST_FACTOR:
        reasons.append(
            Reason(code=Code.SCALE, rule=f"the softcap is at most {_MOST_FACTOR:g}", observed=f"{score.softcap:g}")
        )
    return reasons
