"""What masks that are made in loops cost to compile: attn_compiler's whole compilation against its inner backend's alone.

    python -m benchmarks.bench_reading_cost

The programs are those of tests/passes/recovering/reading/loops.py, around `scaled_dot_product_attention`. Each compilation has empty
caches, and the two backends take turns. Seconds are medians. Writes benchmarks/results/reading_cost.csv. Exits with 1 where a ratio to
Inductor is above the limit. Beside aot_eager, which generates no code, the passes' own share shows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch._inductor.utils import fresh_cache

import attn_compiler
from benchmarks import harness
from tests.passes.recovering.reading.loops import BOUNDED, READ, Loop

RESULTS = Path(__file__).parent / "results" / "reading_cost.csv"
MAX_RATIO = 1.5
COLUMNS = ("program", "steps", "inner", "inner_seconds", "our_seconds", "passes_seconds", "ratio", "difference", "mask")

_LENGTH, _MOST = 96, 64


def _program(loop: Loop, steps: int) -> Callable[..., torch.Tensor]:
    make = loop(steps)

    def attention(q: torch.Tensor, numbers: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=make(numbers, rows))

    return attention


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    numbers = torch.randint(1, _MOST, (_LENGTH,))
    return torch.randn(1, 2, _LENGTH, 32), numbers, torch.randint(0, _MOST, (4 * _MOST, _LENGTH))


def _seconds(
    program: Callable[..., torch.Tensor], backend: str, options: dict[str, str] | None
) -> tuple[float, torch.Tensor]:
    """Of the first call, with empty caches; and what it gave."""
    torch.compiler.reset()
    attn_compiler.reset()
    inputs = _inputs()
    with fresh_cache(), torch.no_grad():
        compiled = torch.compile(program, backend=backend, options=options)
        start = time.perf_counter()
        result = compiled(*inputs)
        return time.perf_counter() - start, result


def measure(loop: Loop, steps: int, inner: str, times: int) -> dict[str, str]:
    """One row. The ratio is that of the medians; the difference is the largest one to eager."""
    program = _program(loop, steps)
    alone, ours, passes = [], [], []
    result = torch.empty(0)
    for _ in range(times):
        alone.append(_seconds(program, inner, None)[0])
        seconds, result = _seconds(program, harness.BACKEND, {"inner": inner})
        ours.append(seconds)
        passes.append(sum(value for report in attn_compiler.reports() for _, value in report.seconds))
    (report,) = attn_compiler.reports()
    eager = program(*_inputs())
    ratio = statistics.median(ours) / statistics.median(alone)
    return {
        "program": loop.__name__,
        "steps": str(steps),
        "inner": inner,
        "inner_seconds": f"{statistics.median(alone):.3f}",
        "our_seconds": f"{statistics.median(ours):.3f}",
        "passes_seconds": f"{statistics.median(passes):.3f}",
        "ratio": f"{ratio:.3f}",
        "difference": f"{(result - eager).nan_to_num().abs().max().item():.1e}",
        "mask": "; ".join(str(site.spec.mask) for site in report.sites)[:120],
    }


def main() -> int:
    """Measure, print and write; 0 where every ratio is within the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--inner", nargs="+", default=["inductor", "aot_eager"])
    parser.add_argument("--programs", nargs="+", help="names of loops; all unless given")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="the commit to name in the rows, where this is no checkout")
    options = parser.parse_args()

    where = harness.environment("cpu", options.commit)
    file = harness.CsvFile(options.output, [*COLUMNS, *where])
    loops = [loop for loop in (*READ, *BOUNDED) if options.programs is None or loop.__name__ in options.programs]
    too_dear = False
    for inner in options.inner:
        measure(loops[0], 1, inner, 1)  # imports, and what either backend makes once
        for loop in loops:
            for steps in options.steps:
                row = measure(loop, steps, inner, options.times)
                file.add({**row, **where})
                print(
                    f"{row['program']} × {row['steps']}, {inner}: {row['our_seconds']} s, of them {row['passes_seconds']} s passes, "
                    f"against {row['inner_seconds']} s: {row['ratio']}; difference {row['difference']}; {row['mask']}",
                    flush=True,
                )
                too_dear |= inner == "inductor" and float(row["ratio"]) > MAX_RATIO
    print(f"limit: {MAX_RATIO}:", "exceeded" if too_dear else "kept")
    return int(too_dear)


if __name__ == "__main__":
    sys.exit(main())
