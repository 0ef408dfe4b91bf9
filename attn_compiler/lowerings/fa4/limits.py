"""Limits of FlashAttention-4, as reasons. They precede the assertions of flash_attn/cute/interface.py of 4.0.0b36, from which they come."""

from __future__ import annotations

import re

from attn_compiler.lowerings.fa4.takes import TAKES
from attn_compiler.lowerings.shared.limits import common as limits, known_bad, mask_limits, offset_limits, takes
from attn_compiler.lowerings.shared.parts import site_parts
from attn_compiler.lowerings.shared.parts.site_parts import ADDED, MASKING
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec import dims
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import FLASH_ATTN_4_DISTRIBUTION, INSTALL, Target

# Betas with the signatures that launch.py calls: b33 has another order of arguments, and a later one may.
FIRST_BETA, LAST_BETA = 34, 36
_VERSION = re.compile(r"4\.0\.0b(\d+)")

_GRADIENT_MULTIPLE = 32


def check_fa4(spec: AttentionSpec, target: Target) -> list[Reason]:
    """Return every reason against the spec on that machine, except those that only a compiler finds."""
    machine = check_machine(target) or limits.check_device(spec, target.device)
    return machine or [
        *takes.refused(TAKES, spec),
        *offset_limits.check_spans(spec),
        *_check_mask(spec),
        *_check_added(spec),
        *_check_head_dims(spec, target),
    ]


def check_machine(target: Target) -> list[Reason]:
    """Require Hopper, or data center Blackwell, all of one kind: flash_attn asks the current device once, for all of them."""
    gpu = takes.check_gpu(TAKES, target)
    if gpu:
        return gpu
    if target.mixed_gpus:
        remedy = "show the process GPUs of one kind (CUDA_VISIBLE_DEVICES)"
        return refuse(Code.SEVERAL_ARCHITECTURES, "all GPUs are of one architecture", "several", remedy)
    return _check_version(target.flash_attn_4)


def _check_version(version: str) -> list[Reason]:
    rule = f"{FLASH_ATTN_4_DISTRIBUTION} 4.0.0b{FIRST_BETA} to 4.0.0b{LAST_BETA} is installed"
    beta = _VERSION.fullmatch(version)
    if beta is not None and FIRST_BETA <= int(beta[1]) <= LAST_BETA:
        return []
    return refuse(
        Code.LIBRARY_VERSION if version else Code.LIBRARY_MISSING,
        rule,
        version or "none",
        INSTALL[FLASH_ATTN_4_DISTRIBUTION],
    )


def _check_mask(spec: AttentionSpec) -> list[Reason]:
    """Require a diagonal, a window, or no mask: FlashAttention-4 has no arguments for other kinds."""
    if TAKES.beyond(spec) & MASKING:
        return refuse(Code.MASK_KIND, "the mask is a causal one, a window, or none", spec.mask.words)
    band = site_parts.parts(spec).band
    if band is None:
        return []
    behind = [side for side in (band.left, band.right) if side is not None and side < 0]
    if behind:
        return refuse(Code.MASK_KIND, "a query may use its own position", spec.mask.words)
    if band.from_end or dims.same(spec.seqlen_q, spec.seqlen_kv):
        return []
    rule = "as many queries as keys, or a mask that is counted from the end"
    return [mask_limits.lengths_reason(spec, rule)]


def _check_added(spec: AttentionSpec) -> list[Reason]:
    if not TAKES.beyond(spec) & ADDED:
        return []
    tensor = spec.added_tensor
    observed = spec.score.added or (tensor.words if tensor is not None else spec.score.words)
    return refuse(Code.MASK_TENSOR, "nothing is added to the scores", observed)


def _check_head_dims(spec: AttentionSpec, target: Target) -> list[Reason]:
    """Refuse combinations with head dims that are taken otherwise."""
    if takes.check_head_dims(TAKES, spec):
        return []
    head_dims = (spec.head_dim_qk, spec.head_dim_v)
    observed = f"head_dim_qk {spec.head_dim_qk}, head_dim_v {spec.head_dim_v}"
    if spec.needs_grad and any(isinstance(size, int) and size % _GRADIENT_MULTIPLE for size in head_dims):
        padded = known_bad.refusal("padded_head_dim", target, observed)
        if padded:
            return padded
    if spec.needs_grad and spec.is_gqa and spec.head_dim_qk != spec.head_dim_v:
        rule = "with gradients and fewer heads of k and v, one head_dim"
        return refuse(Code.HEAD_DIM, rule, observed)
    return [] if target.sm == 90 else _check_blackwell(spec, observed)


def _check_blackwell(spec: AttentionSpec, observed: str) -> list[Reason]:
    sizes = (spec.head_dim_qk, spec.head_dim_v)
    if sizes != (192, 128) and sizes != (256, 256) and not all(isinstance(size, int) and size <= 128 for size in sizes):
        rule = "from sm100 on, head dims are at most 128, or (192, 128), or (256, 256)"
        return refuse(Code.HEAD_DIM, rule, observed)
    if sizes == (256, 256) and spec.needs_grad:
        # Its backward takes no gradient of the lse, which the leaf op has.
        return refuse(Code.HEAD_DIM, "from sm100 on, with gradients, head dims are at most 192", observed)
    return []
