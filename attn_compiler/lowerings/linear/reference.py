"""`linear_reference`: the recurrence by chunks, in plain ops that the inner compiler fuses, on any device; float32 inside, as the models'.

`attn_compiler::linear_reference` is composed of other ops, so AOTAutograd differentiates it and Inductor sees all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_compiler.lowerings.graph_ops.linear_call import SCHEMA
from attn_compiler.lowerings.graph_ops.linear_recurrence import finished, prepared
from attn_compiler.lowerings.linear.chunks import by_chunks
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.linear import LinearForm, LinearSpec
from attn_compiler.spec.target import Target
from attn_compiler.torch_private.op_library import LIBRARY, NAMESPACE

_NAME = "linear_reference"


class LinearReference:
    """The lowering by plain ops, which takes every spec."""

    name = _NAME
    #: the ops of its kernels
    leaves: tuple[str, ...] = ()

    def why_not(self, spec: LinearSpec, target: Target) -> list[Reason]:
        """Refuse nothing: these are PyTorch's ops."""
        return []

    @property
    def op(self) -> torch._ops.OpOverload:
        """Op that replaces `linear_call`, with its operands and its text."""
        found: torch._ops.OpOverload = getattr(torch.ops, NAMESPACE).linear_reference.default
        return found

    @property
    def step_op(self) -> None:
        """None: Inductor itself writes the state of plain ops in place."""
        return None


def run(operands: Sequence[Tensor], text: str) -> tuple[Tensor, Tensor]:
    """Compute the function's results."""
    form = LinearForm.from_text(text)
    return finished(form, operands, *by_chunks(prepared(form, operands)))


if not hasattr(getattr(torch.ops, NAMESPACE), _NAME):
    LIBRARY.define(_NAME + SCHEMA)
    LIBRARY.impl(_NAME, run, "CompositeImplicitAutograd")
