"""Calls that `linear_triton` runs, and how far it is from the recurrence in float64: results, states and all gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.graph_ops.linear_recurrence import definition
from attn_compiler.lowerings.linear import triton_op
from attn_compiler.lowerings.linear.triton_op import LinearTriton
from attn_compiler.passes.matching.linear import draws
from attn_compiler.passes.matching.linear.draws import DrawSizes
from attn_compiler.spec.linear import LinearForm
from attn_compiler.spec.target import Target
from tests.lowerings.linear import linear_forms
from tests.lowerings.linear.linear_forms import CHANNEL, DELTA, STATE_SPACE

FORMS = {"delta": DELTA, "channel": CHANNEL, "ssd": STATE_SPACE}
#: (length, heads of k, heads of v, K, V): lengths around those of chunks, groups, sizes that are no powers of 2
SIZES = (
    (1, 2, 4, 5, 7),
    (37, 1, 3, 16, 24),
    (64, 2, 2, 16, 16),
    (90, 2, 4, 5, 7),
    (130, 1, 2, 32, 48),
    (70, 1, 1, 100, 16),
)


def skip_where_refused() -> None:
    """Skip on a GPU whose assembler is known to be wrong."""
    refused = LinearTriton().why_not(
        linear_forms.spec(FORMS["delta"], device="cuda", needs_grad=True), Target.current("cuda")
    )
    if refused:
        pytest.skip(f"{refused[0].rule}: here {refused[0].observed}")


def problem(
    form: LinearForm,
    sizes: tuple[int, int, int, int, int],
    *,
    sort: str = draws.SORTS[0],
    dtypes: Mapping[str, torch.dtype] | None = None,
    device: str = "cpu",
    batch: int = 2,
) -> list[Tensor]:
    """Operands that need gradients. dtypes: of roles; others are in float32. A decay a channel has as many heads of k as of v."""
    length, heads_k, heads_v, dim_k, dim_v = sizes
    at: dict[str, Any] = {"dim_k": dim_k, "dim_v": dim_v, "heads_k": heads_v if form.channel else heads_k}
    of = linear_forms.spec(form, num_heads_k=at["heads_k"], num_heads_v=heads_v, head_dim_k=dim_k, head_dim_v=dim_v)
    drawn = draws.operands(of, DrawSizes(batch=batch, length=length, heads_v=heads_v, sort=sort, **at))
    kinds = {} if dtypes is None else dtypes
    made = [x.detach().to(device, kinds.get(role, torch.float32)) for role, x in zip(form.roles, drawn, strict=True)]
    return [x.requires_grad_() for x in made]


def furthest(form: LinearForm, given: Sequence[Tensor], *, gradients: bool = True) -> dict[str, float]:
    """The largest difference from the recurrence in float64, of the largest number: of `out`, `last` and the gradients of the roles."""
    exact = dataclasses.replace(form, out_dtype="float64", state_dtype="float64")
    wide = [x.detach().double().requires_grad_() for x in given]
    outs, wanted = triton_op.run(given, form.text), definition(exact, wide)
    found = {name: _far(*pair) for name, *pair in zip(("out", "last"), outs, wanted, strict=True)}
    if not gradients:
        return found
    noise = [torch.randn_like(x) for x in wanted]
    grads = torch.autograd.grad(outs, given, [x.to(out.dtype) for x, out in zip(noise, outs, strict=True)])
    of_wide = torch.autograd.grad(wanted, wide, noise)
    return found | {role: _far(*pair) for role, *pair in zip(form.roles, grads, of_wide, strict=True)}


def _far(found: Tensor, wanted: Tensor) -> float:
    if wanted.numel() == 0:
        return 0.0
    largest = float(wanted.detach().abs().max())
    # max() of Python does not see NaN.
    return float((found.double() - wanted).detach().abs().nan_to_num(torch.inf).max()) / (largest or 1.0)
