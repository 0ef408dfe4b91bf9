"""`fla`: the delta rule by flash-linear-attention's functions, below a leaf op. Never chosen unless asked for: its results are rounded
more often than the model's own.

`attn_compiler::fla` is composed of that op and of the ops before it, which the inner compiler fuses: norms of q and k, and dtypes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from attn_compiler.lowerings.graph_ops.linear_call import SCHEMA
from attn_compiler.lowerings.graph_ops.linear_recurrence import normalised
from attn_compiler.lowerings.linear.chunks import bounded_decays
from attn_compiler.lowerings.linear.heads import check_heads
from attn_compiler.lowerings.linear.triton_ops import register_chunks
from attn_compiler.lowerings.shared.limits.kernel_limits import check_machine
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec.dtypes import HALF
from attn_compiler.spec.linear import LinearForm, LinearSpec
from attn_compiler.spec.target import FLA_DISTRIBUTION, INSTALL, Target
from attn_compiler.torch_private.op_library import LIBRARY, NAMESPACE, Late

_NAME = "fla"
#: the release whose functions fla_calls.py calls
_RELEASE = "0.6."
_ANOTHER = "leave the choice to the compiler, or give lowering='linear_triton' or 'linear_reference'"
_HOPPER = 90
#: releases of Triton with which fla refuses to train a decay a head on Hopper: from .. to, the last one excluded
_WRONG_TRITON = ((3, 4, 0), (3, 7, 1))


class LinearFla:
    """The lowering of the delta rule in half precision by flash-linear-attention, where it is installed."""

    name = _NAME
    #: the ops of its kernels
    leaves: tuple[str, ...] = ("fla_chunks", "fla_chunks_backward")

    def why_not(self, spec: LinearSpec, target: Target) -> list[Reason]:
        """Return the reasons against a call. If the machine can't run it, only the machine's reasons."""
        machine = check_machine(target) or _check_machine(target)
        return machine or [*_check_form(spec), *_check_training(spec, target)]

    @property
    def op(self) -> torch._ops.OpOverload:
        """Op that replaces `linear_call`, with its operands and its text."""
        found: torch._ops.OpOverload = getattr(torch.ops, NAMESPACE).fla.default
        return found

    @property
    def step_op(self) -> None:
        """None: fla's kernel returns a new state."""
        return None


def _check_machine(target: Target) -> list[Reason]:
    if target.triton_interpreted:
        rule = "flash-linear-attention times its kernels on a GPU"
        return refuse(Code.INTERPRETER, rule, "Triton's interpreter", _ANOTHER)
    if target.deterministic:
        rule = "flash-linear-attention does not say that it gives the same in every run"
        return refuse(Code.DETERMINISTIC, rule, "deterministic algorithms")
    if target.mixed_gpus:
        rule, remedy = "all GPUs are of one architecture", "show the process GPUs of one kind (CUDA_VISIBLE_DEVICES)"
        return refuse(Code.SEVERAL_ARCHITECTURES, rule, "several", remedy)
    if target.fla.startswith(_RELEASE):
        return []
    return refuse(
        Code.LIBRARY_VERSION if target.fla else Code.LIBRARY_MISSING,
        f"{FLA_DISTRIBUTION} {_RELEASE}x is installed",
        target.fla or "none",
        INSTALL[FLA_DISTRIBUTION],
    )


def _check_form(spec: LinearSpec) -> list[Reason]:
    form, reasons = spec.form, []
    kinds = (spec.dtype, form.out_dtype, form.state_dtype)
    if form.recurrence != "delta":
        rule = "results of flash-linear-attention's state space are of the dtype of x, where a model's are float32"
        reasons += refuse(Code.DTYPE, rule, form.name, _ANOTHER)
    elif spec.dtype not in HALF or kinds[1:] != (spec.dtype, "float32"):
        rule = "q and the result are of one dtype of half precision, and the state is float32"
        observed = f"q {kinds[0]}, result {kinds[1]}, state {kinds[2]}"
        reasons += refuse(Code.DTYPE, rule, observed, _ANOTHER)
    return [*reasons, *check_heads(spec)]


def _check_training(spec: LinearSpec, target: Target) -> list[Reason]:
    """Refuse training with the Triton releases with which flash-linear-attention raises an error at the first backward:
    https://github.com/fla-org/flash-linear-attention/issues/640."""
    first, right = _WRONG_TRITON
    is_known = not spec.needs_grad or spec.form.channel or target.sm != _HOPPER
    triton = tuple(int(part) for part in re.findall(r"\d+", target.triton)[:3])
    if is_known or not first <= triton < right:
        return []
    newest = ".".join(map(str, right))
    return [
        Reason(
            code=Code.KNOWN_BUG,
            rule=f"on Hopper flash-linear-attention trains the gated delta rule with Triton {newest} or newer (fla #640)",
            observed=f"Triton {target.triton}",
            remedy=f"pip install 'triton>={newest}'",
        )
    ]


def run(operands: Sequence[Tensor], text: str) -> tuple[Tensor, Tensor]:
    """Compute the function's results. q and k are normalised in float32, then rounded to the products' dtype."""
    form = LinearForm.from_text(text)
    given = dict(zip(form.roles, operands, strict=True))
    dtype = given["q"].dtype
    q, k = (normalised(given[x].to(torch.float32), form.eps).to(dtype) for x in ("q", "k"))
    state = given.get("state")
    first = None if state is None else state.to(torch.float32)
    chunks = getattr(torch.ops, NAMESPACE).fla_chunks.default
    g = bounded_decays(given["g"])
    found: tuple[Tensor, Tensor] = chunks(q, k, given["v"].to(dtype), g, given["beta"], None, first, text)
    return found


_CALLS = "attn_compiler.lowerings.linear.fla_calls"

register_chunks("fla_chunks", Late(_CALLS, "forward"), Late(_CALLS, "backward"))
if not hasattr(getattr(torch.ops, NAMESPACE), _NAME):
    LIBRARY.define(_NAME + SCHEMA)
    LIBRARY.impl(_NAME, run, "CompositeImplicitAutograd")
