"""Limits of our Hopper kernel over a latent (kernels/latent_sm90.py), as reasons. The Triton kernel takes the rest: on an H200 the Hopper
kernel was 1.3 to 2.2 times as fast from 64 heads on, and slower with 16 (docs/decode_kernels.md). Imports no Triton."""

from __future__ import annotations

from attn_compiler.lowerings.decode.takes import ON_HOPPER
from attn_compiler.lowerings.shared.limits import kernel_limits, takes
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec.attention import AttentionSpec, LatentSpec
from attn_compiler.spec.target import Target

#: dims of the latent and of the rope part, for which registers and shared memory are laid out
_RANK, _ROPE = 512, 64
#: with fewer heads at least half of a tile's 64 rows are empty, and the Triton kernel has smaller tiles
_FEWEST_HEADS = 33
#: normal float32 numbers, with room for a factor of a few units: a score of -inf times 0 is NaN
_LEAST_SCALE = 1e-30


def refused(spec: AttentionSpec, target: Target) -> list[Reason]:
    """Return every reason against the kernel, for a spec that `decode_latent` takes. An empty list: it is launched."""
    if spec.latent is None:
        raise ValueError("the site has no latent")
    return (
        kernel_limits.check_gluon(target, ON_HOPPER, "decode_latent_sm90")
        or _check_sizes(spec, spec.latent)
        or takes.refused(ON_HOPPER, spec)
        or [
            *ON_HOPPER.check_parts(spec, "the mask is an interval of keys for each sequence, without {}"),
            *_check_least_scale(spec),
        ]
    )


def _check_sizes(spec: AttentionSpec, latent: LatentSpec) -> list[Reason]:
    reasons = []
    rope = 0 if latent.rope is None else latent.rope.shape[3]
    if (latent.rank, rope) != (_RANK, _ROPE):
        rule = f"the latent has {_RANK} dims, and {_ROPE} beside it"
        reasons += refuse(Code.LATENT, rule, f"{latent.rank} and {rope}")
    if not isinstance(spec.num_heads_q, int) or spec.num_heads_q < _FEWEST_HEADS:
        rule = f"at least {_FEWEST_HEADS} heads, whose number is known: the rows of a tile are heads"
        reasons += refuse(Code.LATENT, rule, f"{spec.num_heads_q} heads")
    if spec.seqlen_q != 1:
        observed = f"seqlen_q {spec.seqlen_q}"
        reasons += refuse(Code.LENGTHS, "one query: all rows use the same keys", observed)
    return reasons


def _check_least_scale(spec: AttentionSpec) -> list[Reason]:
    scale = spec.score.scale
    if not 0 < scale < _LEAST_SCALE:
        return []
    return refuse(Code.SCALE, f"the scale is at least {_LEAST_SCALE:g}", f"{scale:g}")


def note(reasons: list[Reason]) -> str:
    """Return the report's note on the chosen kernel."""
    if not reasons:
        return "the kernel for Hopper: 64 heads a program, and what it reads comes through the copy engine"
    return f"not by the kernel for Hopper: {'; '.join(map(str, reasons))}"
