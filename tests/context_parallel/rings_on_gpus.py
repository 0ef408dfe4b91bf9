"""Rings where ranks are GPUs: what they give, how long they take and what they hold, beside the other methods.

torchrun --nproc-per-node 4 -m tests.context_parallel.rings_on_gpus            # one JSON line a case, by rank 0
torchrun --nproc-per-node 2 -m tests.context_parallel.rings_on_gpus --small    # without times, on CPUs if there are no GPUs

Errors are relative, in norm, against one process in float32 (float64 on CPUs), beside that of one process in the ranks' dtype: of the
output, and of the gradients of q, k and v. Memory is the peak over what was there before the step, in MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attn_compiler import ContextParallel
from attn_compiler.context_parallel.layout import Layout
from tests.context_parallel import on_gpus
from tests.context_parallel.on_gpus import DTYPE, HEADS, ON_GPU, WIDTH

METHODS = ("ring", "all_gather", "all_to_all")
ORDERS = (None, "head_tail")
LENGTHS = (32768, 131072)


def main() -> None:
    mesh, small = on_gpus.started()
    for order in ORDERS:
        for is_causal in (True, False):
            on_gpus._say("ring", order=order, causal=is_causal, **_errors(mesh, order, is_causal))
    for length in () if small else LENGTHS:
        for method in METHODS:
            on_gpus._say(method, length=length, **_costs(mesh, method, length))
    dist.destroy_process_group()


def attention(is_causal: bool) -> Callable[..., Tensor]:
    """Of (batch, positions, heads · width) each."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)

    return attend


def _errors(mesh: Any, order: Any, is_causal: bool) -> dict[str, Any]:
    length = 2048 if ON_GPU else 64
    cp = ContextParallel(mesh, method="ring", load_balance=order)
    layout = Layout(size=cp.size, balanced=cp.is_balanced)
    whole, weight = on_gpus._inputs(length), on_gpus._random(1, length, HEADS * WIDTH, seed=9)
    results = []
    for dtype in (torch.float32 if ON_GPU else torch.float64, DTYPE):
        given = [x.to(dtype).requires_grad_() for x in whole]
        out = attention(is_causal)(*given)
        results.append([out, *torch.autograd.grad((out * weight.to(dtype)).sum(), given)])
    own = [layout.part(x, 1, cp.rank).contiguous().requires_grad_() for x in whole]
    out = on_gpus._compiled(attention(is_causal), cp)(*own)
    found = [out, *torch.autograd.grad((out * layout.part(weight, 1, cp.rank)).sum(), own)]
    exact, usual = ([layout.part(x, 1, cp.rank) for x in one] for one in results)
    return {
        "errors": [on_gpus._apart(x, y) for x, y in zip(found, exact, strict=True)],
        "usual": [on_gpus._apart(x, y) for x, y in zip(usual, exact, strict=True)],
        **on_gpus._notes(),
    }


def _costs(mesh: Any, method: Any, length: int) -> dict[str, Any]:
    cp = ContextParallel(mesh, method=method)
    layout = Layout(size=cp.size, balanced=cp.is_balanced)
    own = [layout.part(x, 1, cp.rank).contiguous().requires_grad_() for x in on_gpus._inputs(length)]
    step = on_gpus._compiled(attention(True), cp)
    out = step(*own)
    grad = torch.ones_like(out)

    def both() -> None:
        torch.autograd.grad(step(*own), own, grad)

    both()
    del out
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return {
        "forward": on_gpus._milliseconds(lambda: step(*own)),
        "forward and backward": on_gpus._milliseconds(both),
        "peak MiB": round(peak / 2**20, 1),
        **on_gpus._notes(),
    }


if __name__ == "__main__":
    main()
