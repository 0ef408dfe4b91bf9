"""`linear_triton`: the recurrence by chunks in our Triton kernels, in products of bfloat16 parts that hold as many bits as their results.

`attn_compiler::linear_triton` is composed of a leaf op and of the state space's ops on dt, which the inner compiler fuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_compiler.lowerings.graph_ops.linear_call import SCHEMA
from attn_compiler.lowerings.graph_ops.linear_recurrence import steps
from attn_compiler.lowerings.linear import triton_ops  # noqa: F401 (the ops are registered by the import)
from attn_compiler.lowerings.linear.chunks import bounded_decays
from attn_compiler.lowerings.shared.limits.kernel_limits import check_machine
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec.assemblers import RIGHT_PTXAS
from attn_compiler.spec.dtypes import HALF
from attn_compiler.spec.linear import LinearForm, LinearSpec
from attn_compiler.spec.target import ASSEMBLER_DISTRIBUTION, INSTALL, Target
from attn_compiler.torch_private.op_library import LIBRARY, NAMESPACE

_NAME, _STEP = "linear_triton", "linear_triton_step"
_DTYPES = (*HALF, "float32")
_MACHINES = (80, 90)
#: largest size of a head
_WIDEST = 256
_HOPPER = 90


class LinearTriton:
    """The lowering by our kernels, on an A100, an H100 or one of its kind, or in Triton's interpreter."""

    name = _NAME
    #: the ops of its kernels
    leaves: tuple[str, ...] = ("linear_chunks", "linear_chunks_backward", "linear_one_token")

    def why_not(self, spec: LinearSpec, target: Target) -> list[Reason]:
        """Return the reasons against a call. If the machine can't run the kernels, only the machine's reasons."""
        machine = check_machine(target) or _check_architecture(target)
        return machine or [*_check_dtypes(spec, target), *check_heads(spec), *_check_assembler(spec, target)]

    @property
    def op(self) -> torch._ops.OpOverload:
        """Op that replaces `linear_call`, with its operands and its text."""
        found: torch._ops.OpOverload = _OPS.linear_triton.default
        return found

    @property
    def step_op(self) -> torch._ops.OpOverload:
        """Op of a decoding step that writes the new state over the old one: out = op(operands without the state, state, text)."""
        found: torch._ops.OpOverload = _OPS.linear_triton_step.default
        return found


def _check_architecture(target: Target) -> list[Reason]:
    """Require an architecture with enough shared memory for the tiles. For sm100's tensor memory Triton 3.7 compiles gradient kernels that
    do nothing: 4 registers and no products, without an error."""
    if target.triton_interpreted or target.sm in _MACHINES:
        return []
    rule = f"kernels of linear attention were compiled for {' and '.join(f'sm{sm}' for sm in _MACHINES)}"
    return refuse(Code.ARCHITECTURE, rule, f"sm{target.sm}")


def _check_assembler(spec: LinearSpec, target: Target) -> list[Reason]:
    """Refuse faulty assemblers. On an H200 with ptxas 12.8 the state space's gradients faulted, and Kimi's results were wrong without a
    fault. With ptxas 13.1, and without wgmma, all was right. One token has no products."""
    is_one_token = spec.length == 1 and not spec.needs_grad
    if target.triton_interpreted or target.sm != _HOPPER or target.without_wgmma or is_one_token:
        return []
    found = tuple(int(part) for part in target.ptxas.split(".")) if target.ptxas else (0, 0)
    if found >= RIGHT_PTXAS:
        return []
    newest = ".".join(map(str, RIGHT_PTXAS))
    return refuse(
        Code.KNOWN_BUG,
        f"on Hopper, kernels of several products are assembled by ptxas {newest} or newer, or have no wgmma",
        f"ptxas {target.ptxas}" if target.ptxas else "a ptxas whose version is not known",
        f"{INSTALL[ASSEMBLER_DISTRIBUTION]}, with a driver of CUDA 13; or set DISABLE_MMA_V3=1 before Triton is imported",
    )


def check_heads(spec: LinearSpec) -> list[Reason]:
    """Refuse heads that are too wide."""
    if max(spec.head_dim_k, spec.head_dim_v) <= _WIDEST:
        return []
    rule = f"a head of linear attention has at most {_WIDEST} channels"
    return refuse(Code.HEAD_DIM, rule, f"{spec.head_dim_k} of k, {spec.head_dim_v} of v")


def _check_dtypes(spec: LinearSpec, target: Target) -> list[Reason]:
    """Require inputs and results of at most float32; Triton's interpreter has no products of bfloat16 (see kernel_limits.py)."""
    found = {spec.dtype, spec.form.out_dtype, spec.form.state_dtype} - set(_DTYPES)
    reasons = []
    if found:
        rule = f"kernels of linear attention compute in {', '.join(_DTYPES)}"
        reasons += refuse(Code.DTYPE, rule, ", ".join(sorted(found)))
    if target.triton_interpreted and spec.dtype == "bfloat16":
        rule = "Triton's interpreter computes in float16 or float32"
        reasons += refuse(Code.INTERPRETER, rule, spec.dtype, "call model.float()")
    return reasons


def run(operands: Sequence[Tensor], text: str) -> tuple[Tensor, Tensor]:
    """Compute the function's results."""
    form = LinearForm.from_text(text)
    given = dict(zip(form.roles, operands, strict=True))
    state = given.get("state")
    if state is not None and torch.is_grad_enabled():
        # In the dtype of the model's function, which keeps that tensor: a cache may be written before the backward.
        state = state.to(getattr(torch, form.state_dtype))
    found: tuple[Tensor, Tensor] = _OPS.linear_chunks.default(*_recurrence(form, given), state, text)
    return found


def run_step(operands: Sequence[Tensor], state: Tensor, text: str) -> Tensor:
    """Compute one token. state: as `linear_one_token` takes it; operands: the others, in order."""
    form = LinearForm.from_text(text)
    given = dict(zip((role for role in form.roles if role != "state"), operands, strict=True))
    found: Tensor = _OPS.linear_one_token.default(*_recurrence(form, given), state, text)
    return found


def _recurrence(form: LinearForm, given: Mapping[str, Tensor]) -> tuple[Tensor | None, ...]:
    """Return operands of the leaf ops, up to the state. Sums of decays are finite: a difference of infinite ones would be NaN."""
    if form.recurrence == "delta":
        return given["q"], given["k"], given["v"], bounded_decays(given["g"]), given["beta"], None
    dt = steps(form, given).to(torch.float32)
    return given["C"], given["B"], given["x"], bounded_decays(given["A"].to(torch.float32) * dt), dt, given.get("D")


_OPS: Any = getattr(torch.ops, NAMESPACE)
if not hasattr(getattr(torch.ops, NAMESPACE), _NAME):
    LIBRARY.define(_NAME + SCHEMA)
    LIBRARY.impl(_NAME, run, "CompositeImplicitAutograd")
    LIBRARY.define(_STEP + "(Tensor[] operands, Tensor(a!) state, str text) -> Tensor")
    LIBRARY.impl(_STEP, run_step, "CompositeImplicitAutograd")
