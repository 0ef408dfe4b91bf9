"""On one H200: a prompt whose queries each have 2048 chosen keys, over DeepSeek V3.2's latent, beside the dense kernel over all keys.

    python -m benchmarks.bench_chosen_prefill --budget-seconds 100 --output chosen_prefill.csv

128 heads, a latent of 512 beside 64 dims, bfloat16. Dense: Hopper's kernel with heads of 192 and 128 dims, a causal mask and a tensor of
truth values; it is timed with 16 heads, times 8. What makes q of the latent and the output of its own is not timed, nor what makes k and
v of it: both are as many products. First the kernel is held against its definition, in float64.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_compiler.lowerings.decode import chosen_launch
from attn_compiler.lowerings.decode.chosen_launch import Given
from attn_compiler.lowerings.decode.plan import Schedule
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from benchmarks import bench_wide
from tests.lowerings import kernel_problems
from tests.lowerings.hopper import problems
from tests.lowerings.kernel_cases import Case

COLUMNS = ("seqlen", "side", "us_p50", "error", "failure")
HEADS, RANK, ROPE, CHOSEN = 128, 512, 64, 2048
LENGTHS = (16384, 8192, 32768, 65536)
_SCALE = 192**-0.5
#: keys of a tile, warps, stages, heads of a program
SCHEDULES = ((32, 8, 2, 64), (64, 8, 1, 64), (64, 8, 2, 64), (32, 8, 3, 64), (32, 4, 2, 16))


def _given(seqlen: int, chosen: int, heads: int = HEADS, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """q, the latent, the part beside it, and each query's keys, of which those up to the query's own count."""
    q = torch.randn(1, seqlen, heads, RANK + ROPE, device="cuda", dtype=dtype).transpose(1, 2) * 0.2
    latent, rope = (torch.randn(1, 1, seqlen, width, device="cuda", dtype=dtype) for width in (RANK, ROPE))
    keys = torch.empty(seqlen, chosen, dtype=torch.int64, device="cuda")
    for first in range(0, seqlen, 1024):
        rows = torch.arange(first, min(first + 1024, seqlen), device="cuda")
        score = torch.rand(len(rows), seqlen, device="cuda")
        score.masked_fill_(torch.arange(seqlen, device="cuda") > rows[:, None], -1.0)
        keys[first : first + len(rows)] = score.topk(chosen, -1).indices
    return q, latent, rope, keys, keys <= torch.arange(seqlen, device="cuda")[:, None]


def _asked(given: tuple[Tensor, ...]) -> Given:
    q, latent, rope, keys, counts = given
    return Given(q=q, latent=latent, rope=rope, keys=keys, counts=counts)


def _schedules() -> dict[str, Schedule]:
    return {
        f"{rows} x {keys}, {warps} warps, {stages} stages": Schedule(
            keys=keys, warps=warps, stages=stages, rows=rows, programs=1, least_keys=keys
        )
        for keys, warps, stages, rows in SCHEDULES
    }


def error_of(schedule: Schedule) -> float:
    """Relative to float64, of a short prompt with odd numbers."""
    given = _given(333, 101, 72)
    found, _ = chosen_launch.by_kernel(_asked(given), schedule, _SCALE)
    wide = (*(x.double() for x in given[:3]), *given[3:])
    right, _ = chosen_launch.by_definition_of(_asked(wide), _SCALE)
    return float((found.double() - right).norm() / right.norm())


def dense(seqlen: int) -> float:
    """Microseconds."""
    heads = 16
    case = Case(
        name="dense", batch=1, seqlen_q=seqlen, seqlen_kv=seqlen, heads_q=heads, heads_kv=heads, head_dim=192, head_dim_v=128,
        band=Band(right=0), mask="bqk", needs_grad=False,
    )  # fmt: skip
    problem = bench_wide.build(case)
    operands = problems.operands(problem)

    def call() -> Any:
        return torch.ops.attn_compiler.hopper(problem.q, problem.k, problem.v, operands, problem.text)

    with kernel_problems.planned(problem.plan), torch.no_grad():
        return bench_wide.took(call, 3) * HEADS / heads


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-seconds", type=float, default=100.0)
    parser.add_argument("--output", type=Path, default=Path("chosen_prefill.csv"))
    given = parser.parse_args()
    began = time.monotonic()
    errors: dict[str, float] = {}
    with given.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()

        def say(seqlen: int, side: str, us: float | None, failure: str = "") -> None:
            error = errors.get(side)
            row = {
                "seqlen": seqlen,
                "side": side,
                "us_p50": "" if us is None else f"{us:.0f}",
                "failure": failure[:200],
            }
            row["error"] = "" if error is None else f"{error:.4f}"
            writer.writerow(row)
            file.flush()
            sys.stdout.write("  ".join(str(x) for x in row.values() if x != "") + "\n")
            sys.stdout.flush()

        for seqlen, (name, schedule) in itertools.product(LENGTHS, [*_schedules().items(), ("dense", None)]):
            if time.monotonic() - began > given.budget_seconds:
                return 1
            try:
                if schedule is None:
                    say(seqlen, name, dense(seqlen))
                    continue
                errors[name] = errors[name] if name in errors else error_of(schedule)
                asked = _asked(_given(seqlen, CHOSEN))
                say(
                    seqlen,
                    name,
                    bench_wide.took(functools.partial(chosen_launch.by_kernel, asked, schedule, _SCALE), 3),
                )
            except (RuntimeError, ValueError, TypeError) as failure:
                say(seqlen, name, None, f"{type(failure).__name__}: {failure}")
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
