"""The leaf op of the kernels for Hopper, `attn_compiler::hopper`: its text is a `shared.kernel_plan.Call` with the Triton family's tiles.

operands: those that the plan names, in its order, without `tiles_by_key`. `tiles` are made for the blocks of plan.py.
The leaf op knows nothing of gradients: `attn_compiler::hopper_<family>_given` hands on what it computed, and has the backward of a family.
"""

from __future__ import annotations

from attn_compiler.lowerings.sdpa import cudnn_backward
from attn_compiler.lowerings.shared import parts
from attn_compiler.lowerings.shared.given_ops import Read, Tensors, register_given
from attn_compiler.lowerings.shared.ops import GIVEN, late, register_forward

#: what the backward reads beside the family's operands: q, k, v
_READ = 3


def given_op(family: str) -> str:
    """The name of the op with a family's backward."""
    return f"hopper_{family}{GIVEN}"


def _read(kept: Tensors, text: str) -> Read:
    q, k, v = kept
    return Read(q=q, k=k, v=v, text=text)


register_forward(
    "hopper", forward=late("hopper.launch", "forward", site="ForwardSite", notes=True), dispatch_key="CUDA"
)
register_given(
    "triton", given_op("triton"), leading=lambda text: _READ, read=_read, differentiable=parts.differentiable
)
register_given(
    cudnn_backward.FAMILY,
    given_op(cudnn_backward.FAMILY),
    leading=lambda text: _READ,
    read=_read,
    differentiable=cudnn_backward.differentiable,
    prepare_grad_out=cudnn_backward.grad_out_as_read,
)
