"""PyTorch's own attention kernels, each pinned by the aten op that `scaled_dot_product_attention` would call.

SDPA picks its kernel when AOTAutograd traces it, from global flags that no guard and no cache key sees. Here the op stands
in the Dynamo graph by name, so the choice is part of the graph; ATen's own formulas differentiate it.

Arguments are those of SDPA's composite (aten/src/ATen/native/transformers/attention.cpp): logsumexp only for a backward,
a bool mask as 0 / -inf of q's dtype, the scale always given. Head dims are not padded here: the site is refused.
With -inf, a row without any allowed key gives 0 on every kernel. Up to 2.11 PyTorch gave cuDNN -65504, and such a row was computed
without a mask: https://github.com/pytorch/pytorch/issues/177842.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod

import torch
from torch import fx

from attn_compiler.lowerings.base import Emitter, LayoutDemand, Lowering, Operands
from attn_compiler.lowerings.sdpa.takes import CPU_FLASH, EFFICIENT, EFFICIENT_BEFORE_SM80, FLASH
from attn_compiler.lowerings.shared.calls import cudnn_called
from attn_compiler.lowerings.shared.limits import common as limits, mask_limits, offset_limits
from attn_compiler.lowerings.shared.limits.common import torch_release
from attn_compiler.lowerings.shared.limits.takes import CUDNN, Takes, check_gpu, refused
from attn_compiler.lowerings.shared.parts import mask_nodes, unused
from attn_compiler.lowerings.shared.parts.flags import with_flag
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec import dims
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.dtypes import HALF
from attn_compiler.spec.target import Target

# Bytes that CUDA kernels load at once along a head: every other stride is a multiple of them.
_CUDA_ALIGNMENT = 16
# Elements that are a multiple of that alignment in every dtype.
_EFFICIENT_STEP = 8
# PyTorch 2.15 reads K/V of fewer heads in the memory-efficient kernel (https://github.com/pytorch/pytorch/pull/191085).
_EFFICIENT_GQA = (2, 15)


class _Pinned(Lowering, ABC):
    """One kernel. device: where it runs. kernel: its name in Target.disabled. takes: the sites that it takes on the newest machines."""

    name: str
    device: str
    kernel: str
    takes: Takes

    def unavailable(self, target: Target) -> list[Reason]:
        return check_gpu(self.takes, target) or limits.check_switch(self.kernel, target)

    @abstractmethod
    def _limits(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        """Return the kernel's limits that `takes` does not express."""

    def _taken(self, target: Target) -> Takes:
        return self.takes

    def cannot_package(self) -> list[Reason]:
        return []

    def demand(self, spec: AttentionSpec) -> LayoutDemand:
        return LayoutDemand(alignment=_CUDA_ALIGNMENT)

    def why_not(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        # Without such a machine all other checks would go by a wrong architecture.
        machine = self.unavailable(target) or limits.check_device(spec, self.device)
        return machine or self._refused(self.with_flag(spec, target), target)

    def with_flag(self, spec: AttentionSpec, target: Target) -> AttentionSpec:
        """Return the spec that the kernel is called with: with a causal flag for a mask tensor that means the same, if the kernel takes
        it."""
        return with_flag(spec, lambda told: self._refused(told, target))

    def reads_pairs(self, spec: AttentionSpec, target: Target) -> bool:
        return self.with_flag(spec, target).has_pairs

    def _refused(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        return [*refused(self._taken(target), spec), *self._limits(spec, target)]


class SdpaCudnn(_Pinned):
    """cuDNN's fused attention: fp16/bf16, GQA, a dense mask without gradient, a causal flag from the top left."""

    name = "sdpa_cudnn"
    device = "cuda"
    kernel = cudnn_called.KERNEL
    takes = CUDNN

    def unavailable(self, target: Target) -> list[Reason]:
        return cudnn_called.unavailable(target)

    def _limits(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        return cudnn_called.check_beyond_takes(spec, target)

    def demand(self, spec: AttentionSpec) -> LayoutDemand:
        return LayoutDemand(alignment=_CUDA_ALIGNMENT, zero_strides=False)

    def emit(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
        spec = self.with_flag(spec, emitter.target)
        bias = _tensor(spec, operands)
        if bias is not None:
            bias = mask_nodes.additive(emitter, bias, emitter.value(operands.q).dtype, keep=(torch.float32,))
            bias = mask_nodes.with_adjacent_keys(emitter, bias, operands.k)
        outputs = emitter.call(
            torch.ops.aten._scaled_dot_product_cudnn_attention.default,
            operands.q,
            operands.k,
            operands.v,
            bias,
            spec.needs_grad,
            spec.score.dropout_p,
            mask_limits.causal_flag(spec),
            False,
            scale=spec.score.scale,
        )
        return emitter.call(operator.getitem, outputs, 0)


class SdpaFlash(_Pinned):
    """FlashAttention 2 of PyTorch: fp16/bf16, GQA, one head dim, no mask tensor; its diagonal starts bottom right."""

    name = "sdpa_flash"
    device = "cuda"
    kernel = "flash"
    takes = FLASH

    def _limits(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        return [*self._check_backward(spec, target), *self._check_causal(spec)]

    @staticmethod
    def _check_backward(spec: AttentionSpec, target: Target) -> list[Reason]:
        head_dim = spec.head_dim_qk
        if not (spec.needs_grad and isinstance(head_dim, int) and (86 <= target.sm <= 89 or 120 <= target.sm <= 121)):
            return []
        if head_dim <= 192 or (head_dim > 224 and not spec.score.dropout_p):
            return []
        rule = (
            "with gradients on sm86 to sm89 and sm120 to sm121, head_dim is at most 192, or above 224 without dropout"
        )
        observed = f"head_dim {head_dim}, dropout {spec.score.dropout_p:g}, sm{target.sm}"
        return refuse(Code.HEAD_DIM, rule, observed)

    @staticmethod
    def _check_causal(spec: AttentionSpec) -> list[Reason]:
        seqlen_q, seqlen_kv = spec.seqlen_q, spec.seqlen_kv
        if not spec.mask.is_causal or seqlen_q == seqlen_kv:
            return []
        if not mask_limits.bottom_right(spec):
            return [mask_limits.lengths_reason(spec, "with a causal mask from the top left, as many queries as keys")]
        if seqlen_q == 1 or (isinstance(seqlen_q, int) and seqlen_q <= dims.range_of(spec, seqlen_kv)[0]):
            return []
        return [mask_limits.lengths_reason(spec, "with a causal mask from the bottom right, no more queries than keys")]

    def emit(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
        spec = self.with_flag(spec, emitter.target)
        outputs = emitter.call(
            torch.ops.aten._scaled_dot_product_flash_attention.default,
            operands.q,
            operands.k,
            operands.v,
            spec.score.dropout_p,
            mask_limits.causal_flag(spec),
            False,
            scale=spec.score.scale,
        )
        return emitter.call(operator.getitem, outputs, 0)


class SdpaEfficient(_Pinned):
    """The memory-efficient kernel: any GPU, float32 too, a dense bias with its gradient, head_dim_qk != head_dim_v.

    Before torch 2.15 it takes no K/V of fewer heads. Those are then repeated here, by the nodes that a model without GQA
    has itself (expand and a copy; a view for a single head). Refusing would leave the site to the model's own repetition and, with
    enable_gqa=True, to math, which writes all scores to memory.
    """

    name = "sdpa_efficient"
    device = "cuda"
    kernel = "efficient"
    takes = EFFICIENT

    def _limits(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        return [
            *(limits.check_grid(spec) if spec.score.dropout_p else ()),
            *mask_limits.check_causal(spec),
            *mask_limits.check_causal_alone(spec),
            *mask_limits.check_no_keyless_rows(spec),
            *offset_limits.check_efficient(spec),
        ]

    def _taken(self, target: Target) -> Takes:
        return self.takes if target.sm >= 80 else EFFICIENT_BEFORE_SM80

    def emit(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
        spec = self.with_flag(spec, emitter.target)
        q, k, v = (_with_aligned_ones(emitter, node) for node in (operands.q, operands.k, operands.v))
        if spec.is_gqa and torch_release(str(torch.__version__)) < _EFFICIENT_GQA:
            k, v = (_repeat_heads(emitter, spec, node) for node in (k, v))
        bias = _tensor(spec, operands)
        if bias is not None:
            bias = mask_nodes.additive(emitter, bias, emitter.value(operands.q).dtype)
            bias = mask_nodes.for_efficient(emitter, bias, operands.q, operands.k)
        outputs = emitter.call(
            torch.ops.aten._scaled_dot_product_efficient_attention.default,
            q,
            k,
            v,
            bias,
            # Without an lse the kernel takes a last block of one query, and K/V that all heads share, for a decoding step, and reads the
            # wrong rows of the bias (kernel_forward.h of torch 2.11, `advance_to_block`).
            spec.needs_grad or bias is not None,
            spec.score.dropout_p,
            mask_limits.causal_flag(spec),
            scale=spec.score.scale,
        )
        return emitter.call(operator.getitem, outputs, 0)


def _with_aligned_ones(emitter: Emitter, node: fx.Node) -> fx.Node:
    """Return a view of q, k or v whose axes of size one have aligned strides: the memory-efficient kernel checks those strides too. They
    are never used, and may be any number. A new axis gets the number of elements inside it as its stride."""
    for axis in (2, 1, 0):
        value = emitter.value(node)
        size, stride = value.shape[axis], value.stride(axis)
        if isinstance(size, int) and size == 1 and not (isinstance(stride, int) and stride % _EFFICIENT_STEP == 0):
            without = emitter.call(torch.ops.aten.squeeze.dim, node, axis)
            node = emitter.call(torch.ops.aten.unsqueeze.default, without, axis)
    return node


class SdpaCpuFlash(_Pinned):
    """FlashAttention on the CPU: every float dtype, GQA, one head dim, a dense mask in any strides, also under a causal flag."""

    name = "sdpa_cpu_flash"
    device = "cpu"
    kernel = "flash"
    takes = CPU_FLASH

    def unavailable(self, target: Target) -> list[Reason]:
        if target.device != self.device:
            return refuse(Code.DEVICE, "runs on the CPU", f"device {target.device}")
        return limits.check_switch(self.kernel, target)

    def _limits(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        return [
            *self._check_no_half_copies(spec),
            *mask_limits.check_causal(spec),
            *mask_limits.check_no_keyless_rows(spec),
            *mask_limits.check_no_bias_gradient(spec),
        ]

    def _check_no_half_copies(self, spec: AttentionSpec) -> list[Reason]:
        """Refuse half-precision operands that flash would need copies of.

        SDPA makes no copies for flash: it computes such a call in float32 throughout. Flash rounds the weights, which makes the error up to
        1.5 times as large. Attention that a model computes by hand in half precision is no more exact than flash.
        """
        if spec.decomposed or spec.dtype not in HALF:
            return []
        demand = self.demand(spec)
        apart = [name for name, x in (("q", spec.q), ("k", spec.k), ("v", spec.v)) if demand.broken_by(x) is not None]
        if not apart:
            return []
        rule = "in half precision, a head's elements lie side by side as they are given"
        return refuse(Code.LAYOUT, rule, f"not those of {', '.join(apart)}", "call contiguous() in the model")

    def demand(self, spec: AttentionSpec) -> LayoutDemand:
        return LayoutDemand()

    def emit(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
        spec = self.with_flag(spec, emitter.target)
        operands = unused.with_keys_cleared(emitter, spec, operands)
        mask = _tensor(spec, operands)
        if mask is not None:
            mask = mask_nodes.additive(emitter, mask, emitter.value(operands.q).dtype, keep=(torch.float32,))
        outputs = emitter.call(
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
            operands.q,
            operands.k,
            operands.v,
            0.0,
            mask_limits.causal_flag(spec),
            attn_mask=mask,
            scale=spec.score.scale,
        )
        return emitter.call(operator.getitem, outputs, 0)


def _tensor(spec: AttentionSpec, operands: Operands) -> fx.Node | None:
    """Return the mask or bias that joins the scores, or None."""
    return operands.mask if spec.added_tensor is not None else None


def _repeat_heads(emitter: Emitter, spec: AttentionSpec, node: fx.Node) -> fx.Node:
    """Repeat (B, Hkv, S, D) to (B, Hq, S, D), in the order in which query heads are grouped."""
    heads_q, heads_kv = spec.num_heads_q, spec.num_heads_kv
    if not isinstance(heads_q, int) or not isinstance(heads_kv, int):
        raise TypeError(f"why_not refuses unknown numbers of heads, got {heads_q!r} and {heads_kv!r}")
    if heads_kv == 1:
        return emitter.call(torch.ops.aten.expand.default, node, [-1, heads_q, -1, -1])
    grouped = emitter.call(torch.ops.aten.unsqueeze.default, node, 2)
    repeated = emitter.call(torch.ops.aten.expand.default, grouped, [-1, -1, heads_q // heads_kv, -1, -1])
    return emitter.call(torch.flatten, repeated, 1, 2)
