"""Checks whether cuDNN's attention, as PyTorch calls it, serves a site: for its forward, and for its backward after another forward."""

from __future__ import annotations

from attn_compiler.lowerings.shared.limits import common as limits, cudnn_limits, mask_limits, takes
from attn_compiler.lowerings.shared.parts import flags
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec import dims
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target

# Before this release PyTorch's fake of cuDNN's output fails for an output of another shape than q with symbolic sizes.
_OUTPUT = (2, 13)
#: its name in Target.disabled
KERNEL = "cudnn"


def unavailable(target: Target) -> list[Reason]:
    """Return why it can't run on that machine."""
    gpu = takes.check_gpu(takes.CUDNN, target)
    return gpu or [*cudnn_limits.check_version(target), *limits.check_switch(KERNEL, target)]


def why_not(spec: AttentionSpec, target: Target) -> list[Reason]:
    """Return why it can't serve a site. If the machine can't run it, only the machine's reasons are returned."""
    machine = unavailable(target) or limits.check_device(spec, "cuda")
    return machine or _refused(with_flag(spec, target), target)


def with_flag(spec: AttentionSpec, target: Target) -> AttentionSpec:
    """Return the spec that the kernel is called with (flags.py)."""
    return flags.with_flag(spec, lambda told: _refused(told, target))


def check_beyond_takes(spec: AttentionSpec, target: Target) -> list[Reason]:
    """Return the kernel's limits that `takes.CUDNN` does not express."""
    return [
        *cudnn_limits.check_deterministic(target),
        *cudnn_limits.check_head_dims(spec, target),
        *cudnn_limits.check_lengths(spec, target),
        *cudnn_limits.check_dropout(spec, target),
        *mask_limits.check_causal(spec),
        *mask_limits.check_causal_alone(spec),
        *mask_limits.check_tensor(spec, dtypes=cudnn_limits.tensor_dtypes(spec, target)),
        *mask_limits.check_no_keyless_rows(spec),
        *mask_limits.check_no_bias_gradient(spec),
        *_check_output(spec, target),
    ]


def _refused(spec: AttentionSpec, target: Target) -> list[Reason]:
    return [*takes.refused(takes.CUDNN, spec), *check_beyond_takes(spec, target)]


def _check_output(spec: AttentionSpec, target: Target) -> list[Reason]:
    is_known = all(isinstance(size, int) for size in (*spec.q.shape, *spec.v.shape))
    if is_known or dims.same(spec.head_dim_qk, spec.head_dim_v) or limits.torch_release(target.torch) >= _OUTPUT:
        return []
    rule = "before torch 2.13, a head_dim of v that differs from q's only with known sizes"
    return refuse(Code.SYMBOLIC, rule, f"q {spec.q.shape}, v {spec.v.shape}", limits.STATIC)
