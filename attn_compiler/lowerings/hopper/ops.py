"""The leaf ops of the kernels for Hopper, `attn_compiler::hopper` and `hopper_backward`. Their text is a `shared.parts.kernel_plan.Call`
with the Triton family's tiles.

operands: the plan's, in its order, without `tiles_by_key`; of the backward without `tiles`. Both lists are made for the blocks of
plan.py. This family's own operands follow: a dense mask's bits (mask_bits.py) and an added tensor (added.py). The leaf op has no
gradient: `attn_compiler::hopper_<family>_given` passes on its results, and has the backward of a family.
"""

from __future__ import annotations

from attn_compiler.lowerings.hopper import added, mask_bits
from attn_compiler.lowerings.hopper.plan import is_wide
from attn_compiler.lowerings.shared.calls import cudnn_backward
from attn_compiler.lowerings.shared.ops import leaf_ops
from attn_compiler.lowerings.shared.ops.given_ops import Read, Tensors, register_given
from attn_compiler.lowerings.shared.parts import site_parts as parts
from attn_compiler.lowerings.shared.parts.kernel_plan import Call
from attn_compiler.spec.attention import AttentionSpec

#: the family itself
FAMILY = "hopper"
#: the family whose backward adds up in a fixed order
IN_ORDER = "hopper_in_order"
#: q, k and v, which the backward reads beside the family's operands
_READ = 3


def given_op(family: str, *, is_part: bool = False) -> str:
    """Return the name of the op with a family's backward. is_part: for sites that are merged (merging.py)."""
    return f"hopper_{family}{leaf_ops.PART if is_part else ''}{leaf_ops.GIVEN}"


def _read(kept: Tensors, text: str) -> Read:
    q, k, v = kept
    return Read(q=q, k=k, v=v, text=text)


def grad_operands(spec: AttentionSpec) -> tuple[str, ...]:
    """Return the names of the operands of `hopper_backward`, in order."""
    plan = parts.make_plan(spec)
    # Above 256 head dims dq has a pass of its own, over keys.
    unread = () if is_wide(spec) else ("tiles",)
    further = {mask_bits.BY_KEY: mask_bits.is_there(plan), added.NAME: added.is_there(plan)}
    own = (name for name, here in further.items() if here)
    return (*(name for name in plan.operands if name not in unread), *own)


def _differentiable(operands: Tensors, text: str) -> list[bool]:
    spec = Call.from_text(text).spec
    names = grad_operands(spec)
    if len(names) != len(operands):
        raise ValueError(f"the backward has the operands {', '.join(names) or 'none'}; got {len(operands)}")
    return [name in parts.make_plan(spec).differentiable for name in names]


leaf_ops.register_forward(
    "hopper", forward=leaf_ops.late("hopper.launch", "forward", site="ForwardSite", notes=True), dispatch_key="CUDA"
)
leaf_ops.register_backward(
    FAMILY,
    backward=leaf_ops.late("hopper.backward_launch", "gradients", site="BackwardSite", notes=True),
    differentiable=_differentiable,
    dispatch_key="CUDA",
)
leaf_ops.register_backward(
    IN_ORDER,
    backward=leaf_ops.late("hopper.backward_launch", "gradients_in_order", site="BackwardSiteInOrder", notes=True),
    differentiable=_differentiable,
    dispatch_key="CUDA",
)
for _is_part in (False, True):
    for _family in (FAMILY, IN_ORDER):
        register_given(
            _family,
            given_op(_family, is_part=_is_part),
            leading=lambda text: _READ,
            read=_read,
            differentiable=_differentiable,
            # The copy engine reads whole vectors.
            prepare_grad_out=leaf_ops.like_output,
            is_part=_is_part,
        )
    register_given(
        "triton",
        given_op("triton", is_part=_is_part),
        leading=lambda text: _READ,
        read=_read,
        differentiable=parts.differentiable,
        is_part=_is_part,
    )
register_given(
    cudnn_backward.FAMILY,
    given_op(cudnn_backward.FAMILY),
    leading=lambda text: _READ,
    read=_read,
    differentiable=cudnn_backward.differentiable,
    prepare_grad_out=cudnn_backward.grad_out_as_read,
)
