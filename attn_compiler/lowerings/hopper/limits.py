"""Limits of the kernels for Hopper, as reasons."""

from __future__ import annotations

from attn_compiler.lowerings.hopper.takes import TAKES
from attn_compiler.lowerings.shared.limits import common as shared_limits, kernel_limits, takes
from attn_compiler.lowerings.shared.parts import site_parts as parts
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec import dims
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.dtypes import BYTES
from attn_compiler.spec.target import Target

#: normal float32 numbers, with room for a factor of a few units
_LEAST_FACTOR, _MOST_FACTOR = 1e-30, 1e30
#: beside an added tensor, which is divided by the scale or by the softcap
_LEAST_BESIDE = 1e-6
_REMEDY = "leave the choice to the compiler, or give lowering='triton', whose kernels take such sites"
#: head dims beside which shared memory has room for what is added to the scores
WIDEST_ADDED = 256
#: bytes that the copy engine reads at once
_VECTOR = 16


def check_hopper(spec: AttentionSpec, target: Target) -> list[Reason]:
    """Return every reason against the spec on that machine."""
    machine = check_machine(target) or shared_limits.check_device(spec, target.device)
    return machine or [
        *takes.refused(TAKES, spec),
        *kernel_limits.check_site(spec, target),
        *_check_added(spec),
        *_check_numbers(spec),
    ]


def check_machine(target: Target) -> list[Reason]:
    """Require Hopper and a Triton whose Gluon is known."""
    return kernel_limits.check_gluon(target, TAKES, "hopper")


def _check_added(spec: AttentionSpec) -> list[Reason]:
    kinds, score = parts.parts(spec).kinds, spec.score
    reasons = _check_bias(spec) if "bias" in kinds else []
    widest = max((d for d in (spec.head_dim_qk, spec.head_dim_v) if isinstance(d, int)), default=0)
    if kinds & {"bias", "distances"} and widest > WIDEST_ADDED:
        rule = f"beside what is added to the scores, head dims are at most {WIDEST_ADDED}"
        reasons += refuse(Code.HEAD_DIM, rule, str(widest), _REMEDY)
    divisor = score.scale if score.softcap is None else score.softcap
    if kinds & {"bias", "distances"} and 0 < divisor < _LEAST_BESIDE:
        rule = f"beside a bias, the scale and the softcap are at least {_LEAST_BESIDE:g}"
        reasons += refuse(Code.SCALE, rule, f"{divisor:g}", _REMEDY)
    return reasons


def _check_bias(spec: AttentionSpec) -> list[Reason]:
    """Require a full bias whose rows are whole vectors, since the copy engine reads tiles of it."""
    bias = spec.added_tensor
    if bias is None or bias.dtype not in BYTES:
        return []
    *_, rows, keys = (1, 1, *bias.shape)
    observed = f"({', '.join(map(str, bias.shape))})"
    if not dims.same(rows, spec.seqlen_q) or not dims.same(keys, spec.seqlen_kv):
        rule = "a bias has an element for each pair of a query and a key"
        return refuse(Code.MASK_SHAPE, rule, observed, _REMEDY)
    step = max(_VECTOR // BYTES[bias.dtype], 1)
    if dims.is_multiple(keys, step):
        return []
    rule = f"rows of a bias in {bias.dtype} are a multiple of {step} keys long"
    return refuse(Code.MASK_SHAPE, rule, observed, _REMEDY)


def _check_numbers(spec: AttentionSpec) -> list[Reason]:
    """Bound the factors of scores: with a masked key's score of -inf, a factor of 0 or infinity gives NaN."""
    score = spec.score
    reasons = []
    if 0 < score.scale < _LEAST_FACTOR:
        reasons += refuse(Code.SCALE, f"the scale is at least {_LEAST_FACTOR:g}", f"{score.scale:g}")
    if score.softcap is not None and not score.scale / score.softcap >= _LEAST_FACTOR:
        rule = f"the scale over the softcap is at least {_LEAST_FACTOR:g}"
        reasons += refuse(Code.SCALE, rule, f"{score.scale:g}, {score.softcap:g}")
    if score.softcap is not None and score.softcap > _MOST_FACTOR:
        reasons += refuse(Code.SCALE, f"the softcap is at most {_MOST_FACTOR:g}", f"{score.softcap:g}")
    return reasons
