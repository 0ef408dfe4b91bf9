"""One attention in a fresh process on a GPU, forward and backward: python -m tests.late_kernels CASE [LENGTHS]

Prints how many kernels of ours were compiled ahead of their launch, and how many by it, after each step: after two steps of one length, or
after a step of each of so many lengths.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import attn_compiler
from attn_compiler.spec.fp8_recipe import CurrentScaling, Fp8Recipe
from benchmarks.first_step import Kernels


def padded(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def causal(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def packed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    """Causal, in documents of 90 tokens."""
    at = torch.arange(q.shape[2], device=q.device)
    documents = (at // 90)[None]
    mask = (at[:, None] >= at) & (documents[:, None, :, None] == documents[:, None, None]) & seen
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


#: name: function, queries, whether it is differentiated
CASES: dict[str, Any] = {
    "triton padded": (padded, 700, True),
    "triton biased": (biased, 640, True),
    "triton packed": (packed, 700, True),
    "decode": (padded, 1, False),
    "hopper_fp8": (causal, 704, False),
}


def _inputs(queries: int, keys: int, *, wants_grad: bool) -> tuple[list[Tensor], Tensor]:
    """q, k, v and a bias, and which keys may be used."""
    shapes = [(2, 8, queries, 64), (2, 8, keys, 64), (2, 8, keys, 64), (1, 8, queries, keys)]
    tensors = [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=wants_grad) for s in shapes]
    seen = (torch.arange(keys, device="cuda") > 3)[None, None, None].expand(2, 1, 1, keys).contiguous()
    return tensors, seen


def main() -> None:
    name = sys.argv[1]
    function, queries, wants_grad = CASES[name]
    lowering = name.split()[0]
    options: dict[str, Any] = {"lowering": lowering}
    if lowering.endswith("fp8"):
        options["fp8_recipe"] = Fp8Recipe(scaling=CurrentScaling(granularity="block"))
    lengths = [(queries, max(queries, 700))] * 2
    if len(sys.argv) > 2:
        numbers = random.Random(0).sample(range(150, 900), int(sys.argv[2]))
        lengths = [(1 if queries == 1 else length, length) for length in numbers]
    (kernels := Kernels()).watch()
    compiled = torch.compile(function, backend="attn_compiler", options=options)
    counts = []
    for queries, keys in lengths:
        tensors, seen = _inputs(queries, keys, wants_grad=wants_grad)
        out = compiled(*tensors, seen)
        if wants_grad:
            out.float().square().sum().backward()
        torch.cuda.synchronize()
        counts.append((kernels.ahead, kernels.late))
    reports = attn_compiler.reports()
    found = {
        "counts": counts,
        "kernels": dict(reports[0].kernels),
        "lowering": reports[-1].sites[0].decision.lowering,
        "graphs": len(reports),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
