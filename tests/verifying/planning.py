"""A plan for one function, and what its compiled graph would be called with, without compiling anything."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from attn_compiler.options.options import Options
from attn_compiler.passes import rewrite
from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.reporting.verifications import Verification
from attn_compiler.verifying import first
from attn_compiler.verifying.plan import CheckPlan, prepare

SHAPE = (2, 4, 6, 8)
LENGTH = SHAPE[2]
PADDING = torch.tensor([[1] * LENGTH, [1, 1, 1, 0, 0, 1]])


@dataclass
class Planned:
    """module: rewritten, as the compiler would get it. args: of the call."""

    plan: CheckPlan
    module: fx.GraphModule
    args: tuple[Any, ...]

    def check(self, subject: str) -> Any:
        (check,) = (check for check in self.plan.checks if check.subject == subject)
        return check

    def found(self) -> list[Verification]:
        return first.run_checks(self.plan, self.args).found

    def run(self, subject: str) -> Verification:
        (found,) = (x for x in self.found() if x.subject == subject)
        return found

    def mismatch(self, observed: str = "") -> VerificationMismatch:
        with pytest.raises(VerificationMismatch) as caught:
            self.found()
        assert re.search(observed, caught.value.observed)
        return caught.value


def plans(
    function: Callable[..., Any], *inputs: Any, **options: Any
) -> list[tuple[CheckPlan | None, fx.GraphModule, Any]]:
    """For each graph of `function`: the plan, the rewritten graph module, and the arguments of its call."""
    found: list[tuple[CheckPlan | None, fx.GraphModule, Any]] = []
    chosen = Options(**{"lowerings": ("sdpa_cpu_flash",), "strict": True, "verify": True, **options})

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        plan = prepare(gm, rewrite(gm, chosen))

        def call(*args: Any) -> Any:
            found.append((plan, gm, args))
            return gm.forward(*args)

        return call

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*inputs)
    torch._dynamo.reset()
    return found


def planned(function: Callable[..., Any], *inputs: Any, **options: Any) -> Planned:
    """The plan of the one graph of `function`, which holds an attention."""
    ((plan, module, args),) = plans(function, *inputs, **options)
    assert plan is not None
    return Planned(plan, module, args)


def qkv(
    *,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, ...] = SHAPE,
    kv_heads: int | None = None,
    grad: bool = False,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (shape, *[(shape[0], kv_heads or shape[1], *shape[2:])] * 2)
    return [torch.randn(x, generator=generator).to(dtype).requires_grad_(grad) for x in shapes]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    positions = torch.arange(q.shape[-2], device=q.device)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=positions <= positions[:, None])


def with_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Layer(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal(q, k, v)


class Layers(torch.nn.Module):
    """Two layers, whose sites are named by them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for layer in self.layers:
            q = layer(q, k, v) + q
        return q


def masked(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    """Key padding, as an additive mask."""
    mask = torch.zeros(attention_mask.shape).masked_fill(attention_mask == 0, torch.finfo(torch.float32).min)
    return (q @ k.transpose(-1, -2) * 0.3 + mask[:, None, None, :]).softmax(-1) @ v


def alibi_mask(q: Tensor, k: Tensor, slopes: Tensor, attention_mask: Tensor) -> Tensor:
    """A causal and padded mask in the same tensor as the bias."""
    apart = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
    allowed = (apart <= 0) & (attention_mask != 0)[:, None, None, :]
    return torch.where(allowed, slopes[:, None, None] * apart, torch.finfo(q.dtype).min).to(q.dtype)


def masked_alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, attention_mask: Tensor) -> Tensor:
    return with_mask(q, k, v, alibi_mask(q, k, slopes, attention_mask))
