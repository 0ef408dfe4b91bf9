"""Limits and errors of cuDNN's attention, as PyTorch calls it, by cuDNN version, torch release and architecture.

From `check_cudnn_*` of PyTorch's sdp_utils.cpp, and from the issues that are named where they are used.
"""

from __future__ import annotations

from attn_compiler.lowerings.shared.limits import common as limits, known_bad, mask_limits
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec import dims
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target, cudnn_words

OLDEST = 90_000
# PyTorch 2.13 took over new rules for head_dim 256 (https://github.com/pytorch/pytorch/pull/185553).
NEW_HEAD_DIM_RULES = (2, 13)
HEAD_DIM_192_128 = (192, 128)
HEAD_DIM_256 = (256, 256)


def check_version(target: Target) -> list[Reason]:
    if target.cudnn >= OLDEST:
        return known_bad.refusal("blacklisted", target, "any attention")
    observed = cudnn_words(target.cudnn) if target.cudnn else "none"
    remedy = "install a CUDA build of torch; it brings its own cuDNN"
    return refuse(
        Code.LIBRARY_VERSION if target.cudnn else Code.LIBRARY_MISSING,
        f"cuDNN {cudnn_words(OLDEST)} or newer",
        observed,
        remedy,
    )


def check_deterministic(target: Target) -> list[Reason]:
    if not target.deterministic:
        return []
    return refuse(Code.DETERMINISTIC, "no deterministic algorithms are asked for", "they are")


def check_head_dims(spec: AttentionSpec, target: Target) -> list[Reason]:
    reasons = limits.check_head_dims(spec, multiple=8, limit=_head_dim_limit(spec, target))
    head_dims = (spec.head_dim_qk, spec.head_dim_v)
    if reasons or not spec.needs_grad or head_dims in (HEAD_DIM_192_128, HEAD_DIM_256):
        return reasons
    large = [size for size in head_dims if isinstance(size, int) and size > 128]
    if not large:
        return reasons
    observed = f"head_dim_qk {spec.head_dim_qk}, head_dim_v {spec.head_dim_v}"
    return refuse(Code.HEAD_DIM, "with gradients, head dims are at most 128, or (192, 128), or (256, 256)", observed)


def _head_dim_limit(spec: AttentionSpec, target: Target) -> int:
    is_192_128 = (spec.head_dim_qk, spec.head_dim_v) == HEAD_DIM_192_128
    is_sm10x = target.sm // 10 == 10
    if limits.torch_release(target.torch) < NEW_HEAD_DIM_RULES:
        if target.sm == 90 and target.cudnn >= 91_000:
            return 256
        return 192 if is_sm10x and is_192_128 and target.cudnn >= 91_100 else 128
    if not (target.sm == 90 or is_sm10x):
        return 128
    if target.cudnn > 92_200 and not (target.sm == 107 and target.cudnn <= 92_500):
        return 256
    return 192 if is_192_128 and target.cudnn >= 91_100 else 128


def check_dropout(spec: AttentionSpec, target: Target) -> list[Reason]:
    p = spec.score.dropout_p
    if not p:
        return []
    reasons = known_bad.refusal("dropout", target, f"dropout {p:g}")
    if not (p * 16).is_integer():
        remedy = "round dropout_p to a multiple of 1/16 (0.125, 0.0625)"
        reasons += refuse(Code.DROPOUT, "dropout is a multiple of 1/16", f"{p:g}", remedy)
    if dims.range_of(spec, spec.seqlen_q)[0] < 2:
        reasons += refuse(Code.DROPOUT, "with dropout, more than one query", f"seqlen_q {spec.seqlen_q}")
    return reasons


def check_lengths(spec: AttentionSpec, target: Target) -> list[Reason]:
    """Refuse lengths that a kernel does not take, or is known to compute wrong."""
    reasons = check_few(spec, target)
    if mask_limits.causal_flag(spec) and spec.added_tensor is None:
        return reasons
    return reasons + check_nan_backward(spec, target, with_queries=spec.added_tensor is not None)


def check_few(spec: AttentionSpec, target: Target) -> list[Reason]:
    reasons = []
    if dims.range_of(spec, spec.seqlen_kv)[0] < 2:
        reasons += refuse(Code.LENGTHS, "more than one key", f"seqlen_kv {spec.seqlen_kv}")
    if dims.range_of(spec, spec.seqlen_q)[0] >= 2:
        return reasons
    observed = f"seqlen_q {spec.seqlen_q}"
    reasons += known_bad.refusal("decode", target, observed)
    return reasons + (known_bad.refusal("one_query_gradient", target, observed) if spec.needs_grad else [])


def check_nan_backward(spec: AttentionSpec, target: Target, *, with_queries: bool) -> list[Reason]:
    """Refuse lengths whose dQ can be NaN. PyTorch 2.15 checks seqlen_kv, without a causal flag; with a mask tensor, seqlen_q is checked
    too."""
    watched = (spec.seqlen_kv, spec.seqlen_q) if with_queries else (spec.seqlen_kv,)
    if not spec.needs_grad or not any(dims.can_have_remainder(size, modulus=128, remainder=64) for size in watched):
        return []
    return known_bad.refusal("nan_dq", target, f"seqlen_q {spec.seqlen_q}, seqlen_kv {spec.seqlen_kv}")


def tensor_dtypes(spec: AttentionSpec, target: Target) -> tuple[str, ...]:
    """Return the dtypes of a mask tensor that are read without a cast.

    Before 2.15 a float32 mask of a bfloat16 q was read as bfloat16 (https://github.com/pytorch/pytorch/pull/191612).
    """
    reads_float32 = limits.torch_release(target.torch) >= (2, 15)
    return (spec.dtype, "float32") if reads_float32 else (spec.dtype,)
