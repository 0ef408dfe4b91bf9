"""Limits of libraries' kernels whose offsets are 32-bit, as reasons. Our own kernels use 64 bits wherever a tensor may be that large.

A size that is not known while compiling passes: only a size that is known to be too large is refused.
"""

from __future__ import annotations

import math

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec.attention import AttentionSpec, TensorSpec

#: elements that a signed offset of 32 bits reaches
REACH = 2**31
_SPLIT = "split the batch, or the heads"
#: CuTe multiplies an index of 32 bits by a stride before it widens the product.
_CUTE = "https://github.com/meta-pytorch/MSLK/pull/303"
#: Rows of a bias, and dropout's random numbers: silently wrong in the forward, an illegal access in the backward.
_EFFICIENT = "https://github.com/pytorch/pytorch/issues/187227"


def check_spans(spec: AttentionSpec) -> list[Reason]:
    """Refuse tensors that reach further, inputs and the output, for kernels in CuTe."""
    found = {name: _span(tensor) for name, tensor in (("q", spec.q), ("k", spec.k), ("v", spec.v))}
    found["the output"] = _product(spec.batch, spec.num_heads_q, spec.seqlen_q, spec.head_dim_v)
    far = [f"{name} {span}" for name, span in found.items() if span > REACH]
    if not far:
        return []
    rule = f"tensors reach over at most {REACH} elements: offsets are of 32 bits ({_CUTE})"
    return refuse(Code.TOO_LARGE, rule, ", ".join(far), _SPLIT)


def check_efficient(spec: AttentionSpec) -> list[Reason]:
    """Refuse sizes beyond 32 bits, for the memory-efficient kernel: strides of heads and rows, and the start of a row of scores."""
    far = [
        f"{name} in strides of {tensor.strides}"
        for name, tensor in (("q", spec.q), ("k", spec.k), ("v", spec.v))
        if any(isinstance(stride, int) and stride >= REACH for stride in tensor.strides[1:3])
    ]
    reasons = [
        Reason(code=Code.TOO_LARGE, rule=f"strides of heads and positions are below {REACH}", observed=n) for n in far
    ]
    tensor, pairs = spec.added_tensor, _product(spec.seqlen_q, spec.seqlen_kv)
    has_rows = tensor is not None and (1, *tensor.shape)[-2] != 1
    if pairs >= REACH and (has_rows or spec.score.dropout_p):
        rule = f"with a mask or dropout, below {REACH} pairs of a head: offsets are of 32 bits ({_EFFICIENT})"
        reasons += refuse(Code.TOO_LARGE, rule, f"{spec.seqlen_q} x {spec.seqlen_kv}")
    return reasons


def _span(tensor: TensorSpec) -> int:
    """Return the number of elements from the first to the last, both included; 0 if that is not known."""
    sizes = list(zip(tensor.shape, tensor.strides, strict=True))
    if not all(isinstance(size, int) and isinstance(stride, int) for size, stride in sizes):
        return 0
    return 1 + sum((int(size) - 1) * int(stride) for size, stride in sizes)


def _product(*sizes: int | str) -> int:
    """Multiply sizes; 0 if one is not known."""
    return math.prod(size if isinstance(size, int) else 0 for size in sizes)
