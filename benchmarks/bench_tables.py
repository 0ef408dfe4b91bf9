"""On a GPU: the gradient of a learned table that a bias is gathered from, T5's buckets and Swin's tables of places, and how far it is off.

    python -m benchmarks.bench_tables

Each side is a function of one attention, forward and backward: the uncompiled one, Inductor's, our choice, and each lowering that is named
here and takes the site. error: ‖x - exact‖ / ‖exact‖ of the table's gradient, exact of the same numbers in float64. differs: the
largest difference of two calls over the largest number. us_p50: of a call, with its launches. A side that fails is a row with the reason.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attn_compiler
from benchmarks import bench_h200, built_sites, harness
from benchmarks.built_sites import Built
from benchmarks.random_sites import Site

RESULTS = Path(__file__).parent / "results" / "table_gradients_h200.csv"
#: batch, heads, tokens, head dim
SITES: Mapping[str, Sequence[tuple[int, int, int, int]]] = {
    "buckets": ((1, 16, 197, 64), (8, 12, 512, 64), (2, 16, 2048, 64)),
    "table": ((64, 3, 49, 32), (16, 24, 49, 32), (8, 6, 144, 32), (8, 12, 196, 64), (2, 4, 576, 32)),
}
#: sides by name, with the options that compile them; None: uncompiled
SIDES: Mapping[str, Mapping[str, Any] | None] = {
    "eager": None,
    "inductor": {"backend": "inductor"},
    "attn_compiler": {"backend": "attn_compiler"},
    **{
        name: {"backend": "attn_compiler", "options": {"lowerings": [name]}}
        for name in ("triton", "hopper", "sdpa_efficient", "cudnn", "math")
    },
}
NAMES = ("mask", "batch", "heads", "tokens", "head_dim", "dtype", "side")
COLUMNS = (*NAMES, "lowering", "error", "of_eager", "differs", "us_p50", "failure")
_ROUNDS = 15


def site_of(mask: str, batch: int, heads: int, tokens: int, head_dim: int) -> Site:
    return Site(
        family="biased", batch=batch, heads_q=heads, heads_kv=heads, seqlen_q=tokens, seqlen_k=tokens, head_dim=head_dim,
        mask=mask, causal=False, window=0, layout="contiguous", repeated=False, training=True, seed=0,
    )  # fmt: skip


def _gradient(call: Callable[..., tuple[Tensor, ...]], built: Built, dtype: torch.dtype) -> Tensor:
    """Of the table, which is the last operand that has one."""
    tensors = [x.detach().to(dtype).requires_grad_() if x.requires_grad else x for x in built.operands]
    (out,) = call(*tensors)
    out.backward(built.grad_out.to(dtype))
    table = next(x for x in reversed(tensors) if x.requires_grad)
    if table.grad is None:
        raise ValueError("the table got no gradient")
    return table.grad


def measure(built: Built, dtype: torch.dtype, exact: Tensor, options: Mapping[str, Any] | None) -> dict[str, str]:
    """The measured columns of one side."""
    attn_compiler.reset()
    torch.compiler.reset()
    call = built.call if options is None else torch.compile(built.call, **options)
    first, second = (_gradient(call, built, dtype).double() for _ in range(2))
    found = {site.decision.lowering for report in attn_compiler.reports() for site in report.sites}
    return {
        "lowering": ", ".join(sorted(found)),
        "error": f"{float((first - exact).norm() / exact.norm()):.2e}",
        "differs": f"{float((first - second).abs().max() / exact.abs().max()):.1e}",
        "us_p50": f"{_timed(lambda: _gradient(call, built, dtype)):.1f}",
    }


def _timed(call: Callable[[], Tensor]) -> float:
    synchronise = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    times = []
    for _ in range(_ROUNDS):
        synchronise()
        start = time.perf_counter()
        call()
        synchronise()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def rows(
    device: str, dtypes: Sequence[torch.dtype], sites: Mapping[str, Sequence[tuple[int, int, int, int]]] = SITES
) -> Iterator[dict[str, str]]:
    """A row for each side of each site."""
    for mask, dtype, shape in ((name, dtype, shape) for name in sites for dtype in dtypes for shape in sites[name]):
        built = built_sites.build(site_of(mask, *shape), device=device, dtype=dtype)
        exact = _gradient(built.call, built, torch.float64)
        eager = None
        for side, options in SIDES.items():
            named = (mask, *shape, str(dtype).removeprefix("torch."), side)
            row = dict(zip(NAMES, map(str, named), strict=True))
            try:
                row |= measure(built, dtype, exact, options)
                eager = float(row["error"]) if options is None else eager
                row["of_eager"] = "" if not eager else f"{float(row['error']) / eager:.2f}"
            except Exception as error:  # noqa: BLE001 (a side that fails must not cost the others, and its row names it)
                row["failure"] = bench_h200.failure(error)
            yield row


def main() -> int:
    """Measure every site; 0 where no side of ours errs more than twice as much as eager."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
    harness.add_output(parser, RESULTS)
    options = parser.parse_args()
    file, where = harness.opened(options, COLUMNS, options.device)
    for row in rows(options.device, [getattr(torch, name) for name in options.dtypes]):
        file.add({**row, **where})
        print(*(f"{name} {row[name]}" for name in COLUMNS if row.get(name)), flush=True)
    return int(any(is_off(row) for row in file.rows))


def is_off(row: Mapping[str, str]) -> bool:
    """Whether a side of ours breaks the rule, or gives another number in a second call."""
    ours = row["side"] not in ("eager", "inductor") and row.get("lowering") != "untouched"
    return ours and bool(row.get("of_eager")) and (float(row["of_eager"]) > 2 or float(row["differs"]) > 0)


if __name__ == "__main__":
    sys.exit(main())
