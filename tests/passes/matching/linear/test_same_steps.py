"""A function that does something else at the sizes of a model than at small ones, without a branch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from attn_compiler.passes.matching.linear import same_steps, substitutes
from attn_compiler.passes.matching.linear.running import Proposed
from attn_compiler.spec.linear import LinearForm
from tests.lowerings.linear import linear_forms
from tests.near_miss import linear_variants


class _Runs(Proposed):
    """Runs another function in the place of the model's own."""

    function: Callable[[Tensor, Tensor], Tensor]

    def run(self, form: LinearForm, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return self.function(operands[0], operands[2]), operands[0]


def _why(function: Callable[[Tensor, Tensor], Tensor], **sizes: int | str) -> str | None:
    own = substitutes.proposal(linear_variants.own("torch_recurrent_gated_delta_rule"))
    assert own is not None
    proposed = _Runs(**{field.name: getattr(own, field.name) for field in dataclasses.fields(own)})
    object.__setattr__(proposed, "function", function)
    form = dataclasses.replace(linear_forms.DELTA, chunk=1)
    spec = dataclasses.replace(linear_forms.spec(form), num_heads_k=8, num_heads_v=16, head_dim_k=64, head_dim_v=128)
    return same_steps.why_not(proposed, dataclasses.replace(spec, **{"batch": 64, "length": 24, **sizes}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "function",
    [
        lambda q, v: q * q.shape[-1] ** -0.5,
        lambda q, v: q.repeat_interleave(v.shape[2] // q.shape[2], 2) * v.shape[-1] ** -0.5,
        lambda q, v: torch.stack([q[:, i] * 2.0 for i in range(q.shape[1])], 1),
        lambda q, v: q + torch.zeros(q.shape) + torch.arange(q.shape[0] * q.shape[1])[0],
    ],
)
@pytest.mark.parametrize("batch", [4096, "s0"])
def test_heads_dims_and_lengths_may_be_used(function: Callable[[Tensor, Tensor], Tensor], batch: int | str) -> None:
    assert _why(function, batch=batch) is None


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda q, v: q * (1 + q.shape[0] // 2048), "computes with ('mul', 3.0)"),
        (lambda q, v: q * 2.0 ** (q.shape[0] * q.shape[1] // 65536), "computes with ('mul', 2.0)"),
        (lambda q, v: q.tril(-(q.shape[0] // 2048)), "computes with ('tril', -2.0)"),
        (lambda q, v: q if q.shape[0] < 64 else q.clone(), "takes other steps"),
        (lambda q, v: sum([q.exp() for _ in range(q.shape[0] * v.shape[2] // 512)], q), "takes other steps"),
    ],
)
@pytest.mark.parametrize("batch", [4096, "s0"])
def test_numbers_and_loops_of_other_sizes_are_found(
    function: Callable[[Tensor, Tensor], Tensor], why: str, batch: int | str
) -> None:
    assert why in str(_why(function, batch=batch))
