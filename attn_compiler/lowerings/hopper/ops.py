"""The leaf op of the kernels for Hopper, `attn_compiler::hopper`: its text is a `shared.kernel_plan.Call` with the Triton family's tiles.

operands: those that the plan names, in its order, without `tiles_by_key`. `tiles` are made for the blocks of plan.py.
The leaf op knows nothing of gradients: `attn_compiler::hopper_given` hands on what it computed, and has the backward of the Triton family.
"""

from __future__ import annotations

from attn_compiler.lowerings.shared import parts
from attn_compiler.lowerings.shared.given_ops import Read, Tensors, register_given
from attn_compiler.lowerings.shared.ops import GIVEN, late, register_forward

BACKWARD_OF = "triton"
#: what the backward reads beside the family's operands: q, k, v
_READ = 3


def _read(kept: Tensors, text: str) -> Read:
    q, k, v = kept
    return Read(q=q, k=k, v=v, text=text)


register_forward(
    "hopper", forward=late("hopper.launch", "forward", site="ForwardSite", notes=True), dispatch_key="CUDA"
)
register_given(
    BACKWARD_OF,
    f"hopper{GIVEN}",
    leading=lambda text: _READ,
    read=_read,
    differentiable=parts.differentiable,
)
