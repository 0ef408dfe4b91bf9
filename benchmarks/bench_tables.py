"""On a GPU: the gradient of a learned table that a bias is gathered from, T5's buckets and Swin's tables of places, and how far it is off.

    python -m benchmarks.bench_tables

Each side is a function of one attention, forward and backward: the uncompiled one, Inductor's, our choice, and each lowering that is named
here and takes the site. error: ‖x - exact‖ / ‖exact‖ of the table's gradient, exact of the same numbers in float64. differs: the largest
difference of two calls over the largest number. us_p50: of a call, with its launches. A side that fails is a row with the reason.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import attn_compiler
from benchmarks import harness, random_sites
from benchmarks.harness import Bench, Row, arg
from benchmarks.random_sites import Built, Site

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


@dataclass(frozen=True)
class Table(harness.Named):
    """A learned table: "buckets" or "table"."""

    mask: str
    batch: int
    heads: int
    tokens: int
    head_dim: int
    dtype: str = "bfloat16"

    @property
    def site(self) -> Site:
        return Site(
            family="biased", batch=self.batch, heads_q=self.heads, heads_kv=self.heads, seqlen_q=self.tokens,
            seqlen_k=self.tokens, head_dim=self.head_dim, mask=self.mask, causal=False, window=0, layout="contiguous",
            repeated=False, training=True, seed=0,
        )  # fmt: skip


CASES = (
    *(Table("buckets", *sizes) for sizes in ((1, 16, 197, 64), (8, 12, 512, 64), (2, 16, 2048, 64))),
    *(Table("table", *sizes) for sizes in ((64, 3, 49, 32), (16, 24, 49, 32), (8, 6, 144, 32), (8, 12, 196, 64))),
    Table("table", 2, 4, 576, 32),
)


def _gradient(call: Callable[..., tuple[Tensor, ...]], built: Built, dtype: torch.dtype) -> Tensor:
    """Of the table, which is the last operand that has one."""
    tensors = [x.detach().to(dtype).requires_grad_() if x.requires_grad else x for x in built.operands]
    (out,) = call(*tensors)
    out.backward(built.grad_out.to(dtype))
    table = next(x for x in reversed(tensors) if x.requires_grad)
    if table.grad is None:
        raise ValueError("the table got no gradient")
    return table.grad


def measured(built: Built, dtype: torch.dtype, exact: Tensor, options: Mapping[str, Any] | None) -> dict[str, str]:
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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    times = []
    for _ in range(_ROUNDS):
        harness.synchronize(device)
        start = time.perf_counter()
        call()
        harness.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def measure(table: Table, given: Namespace) -> Iterator[Row]:
    """A row for each side."""
    dtype = getattr(torch, table.dtype)
    built = random_sites.build(table.site, device=given.device, dtype=dtype)
    exact = _gradient(built.call, built, torch.float64)
    eager = None
    for side, options in SIDES.items():
        row = {**table.names, "side": side}
        try:
            row |= measured(built, dtype, exact, options)
            eager = float(row["error"]) if options is None else eager
            row["of_eager"] = "" if not eager else f"{float(row['error']) / eager:.2f}"
        except Exception as error:  # noqa: BLE001 (a side that fails must not cost the others, and its row names it)
            row["failure"] = harness.failure(error)
        yield row


def is_off(row: Row) -> bool:
    """Whether a side of ours breaks the rule, or gives another number in a second call."""
    ours = row["side"] not in ("eager", "inductor") and row.get("lowering") != "untouched"
    return ours and bool(row.get("of_eager")) and (float(row["of_eager"]) > 2 or float(row["differs"]) > 0)


BENCH = Bench(
    doc=__doc__, results="table_gradients_h200.csv", columns=COLUMNS, measure=measure, again=True, sides=SIDES,
    cases=lambda given: [replace(case, dtype=dtype) for dtype in given.dtypes for case in CASES],
    failed=lambda rows: any(map(is_off, rows)),
    options=(arg("--dtypes", nargs="+", default=["bfloat16", "float16"]),),
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
