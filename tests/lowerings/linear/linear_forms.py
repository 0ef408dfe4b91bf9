"""Forms with operands that fit them, and a spec."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attn_compiler.passes.matching.linear import draws
from attn_compiler.passes.matching.linear.draws import DrawSizes
from attn_compiler.spec.linear import LinearForm, LinearSpec

DELTA = LinearForm(
    function="models:delta#0", recurrence="delta", roles=("q", "k", "v", "g", "beta", "state"), chunk=64, eps=1e-6
)
CHANNEL = LinearForm(
    function="models:channel#0",
    recurrence="delta",
    roles=("q", "k", "v", "g", "beta"),
    channel=True,
    chunk=64,
    eps=1e-6,
)
STATE_SPACE = LinearForm(
    function="models:ssd#0",
    recurrence="ssd",
    roles=("x", "dt", "A", "B", "C", "D", "dt_bias", "state"),
    chunk=64,
    softplus=True,
    limits=(0.0, float("inf")),
)


def spec(form: LinearForm = DELTA, **changed: Any) -> LinearSpec:
    sizes: dict[str, Any] = {
        "batch": 2,
        "length": 90,
        "num_heads_k": 4 if form.channel else 2,
        "num_heads_v": 4,
        "head_dim_k": 5,
        "head_dim_v": 7,
        "dtype": "float32",
        "device": "cpu",
    }
    return LinearSpec(form=form, **{**sizes, **changed})


def problems(*, length: int, dtype: torch.dtype = torch.float32) -> Iterator[tuple[LinearForm, list[Tensor]]]:
    torch.manual_seed(0)
    for form in (DELTA, CHANNEL, STATE_SPACE):
        of = spec(form)
        at = DrawSizes(
            batch=2,
            length=length,
            heads_k=of.num_heads_k,
            heads_v=of.num_heads_v,
            dim_k=of.head_dim_k,
            dim_v=of.head_dim_v,
            sort=draws.SORTS[0],
        )
        yield form, [x.detach() for x in draws.operands(of, at, dtype)]
