"""What each of several ranks computes of one causal attention, on one GPU and without what the ranks exchange.

    python -m benchmarks.bench_context_parallel --lengths 16384 65536

The masks are those that the pass `context_parallel` writes for `all_gather`: the queries of a rank against the keys of the whole sequence,
with the rank as a number of run time. A row is a length, an order and a rank. `efficiency`: the time of the whole attention over the ranks'
number times this rank's. Writes benchmarks/results/context_parallel_h200.csv.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import attn_compiler
from benchmarks import harness

RESULTS = Path(__file__).parent / "results" / "context_parallel_h200.csv"
HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
ORDERS = {"contiguous": False, "head_tail": True}
COLUMNS = (
    *("length", "ranks", "order", "rank", "lowering", "forward_ms", "step_ms", "whole_forward_ms", "whole_step_ms"),
    *("efficiency_forward", "efficiency_step"),
)
Attend = Callable[..., torch.Tensor]


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention on one GPU."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def of_rank(length: int, ranks: int, balanced: bool) -> Attend:
    """(q of a rank, k and v of all, rank) -> the rank's part of the output. rank: (), int32."""
    own, half = length // ranks, length // ranks // 2

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
        count, at = torch.arange(own, device=q.device), rank.to(torch.int64)
        positions = count + at * own
        if balanced:
            positions = torch.where(count < half, count + at * half, count + (at * -half + (2 * ranks - 2) * half))
        allowed = torch.arange(length, device=q.device) <= positions[None, None, :, None]
        return scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)

    return attend


def operands(queries: int, keys: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of one sequence, bfloat16."""
    shapes = ((HEADS, queries), (HEADS_KV, keys), (HEADS_KV, keys))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(1, h, s, HEAD_DIM, device=device, dtype=dtype, requires_grad=True) for h, s in shapes)
    return q, k, v


def times(attend: Attend, given: tuple[torch.Tensor, ...], device: str, seconds: float) -> tuple[float, float]:
    """Milliseconds of a forward, and of a forward with its backward."""
    grad = torch.randn_like(given[0])

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attend(*given)

    def step() -> torch.Tensor:
        for x in given[:3]:
            x.grad = None
        out = attend(*given)
        out.backward(grad)
        return out.detach()

    steps = {"forward": forward, "step": step}
    for one in steps.values():
        one()
        one()
    measured = harness.interleave(steps, device, seconds=seconds, min_rounds=3, max_rounds=50)
    return statistics.median(measured["forward"]), statistics.median(measured["step"])


def measure(length: int, ranks: int, device: str, seconds: float) -> Iterator[dict[str, str]]:
    """A row for each order and rank."""
    torch._dynamo.reset()
    compiled = torch.compile(whole, backend="attn_compiler", dynamic=False)
    of_whole = times(compiled, operands(length, length, device), device, seconds)
    for order, balanced in ORDERS.items():
        torch._dynamo.reset()
        attend = torch.compile(of_rank(length, ranks, balanced), backend="attn_compiler", dynamic=False)
        given = operands(length // ranks, length, device)
        for rank in range(ranks):
            at = torch.tensor(rank, dtype=torch.int32, device=device)
            forward, step = times(attend, (*given, at), device, seconds)
            yield {
                "length": str(length),
                "ranks": str(ranks),
                "order": order,
                "rank": str(rank),
                "lowering": attn_compiler.reports()[-1].sites[0].decision.lowering,
                "forward_ms": f"{forward:.3f}",
                "step_ms": f"{step:.3f}",
                "whole_forward_ms": f"{of_whole[0]:.3f}",
                "whole_step_ms": f"{of_whole[1]:.3f}",
                "efficiency_forward": f"{of_whole[0] / ranks / forward:.3f}",
                "efficiency_step": f"{of_whole[1] / ranks / step:.3f}",
            }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", nargs="+", type=int, default=[16384, 65536])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1.0, help="timing of one row (default %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="the commit to name in the rows, where this is no checkout")
    options = parser.parse_args()
    where = harness.environment(options.device, options.commit)
    file = harness.CsvFile(options.output, [*COLUMNS, *where])
    for length in options.lengths:
        for row in measure(length, options.ranks, options.device, options.seconds):
            file.add({**row, **where})
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
