"""What every benchmark shares: a step to time, two of them timed in turn, and a CSV that says where it ran.

How they are timed is `attn_compiler.compare`'s: attn_compiler/compiling/comparing/timing.py.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from attn_compiler.compiling.comparing.timing import (
    CpuClock as CpuClock,
    interleave as interleave,
    milliseconds as milliseconds,
    percentiles as percentiles,
    ratio as ratio,
)

BACKEND = "attn_compiler"
BASELINE = "inductor"
# A ratio (baseline's time over ours) below this is slower beyond noise.
MIN_RATIO = 0.98

Step = Callable[[], torch.Tensor]


def main_output(output: Any) -> torch.Tensor:
    """The tensor that a model is called for: its logits, its last hidden state, or its images, of which a list is stacked."""
    if isinstance(output, torch.Tensor):
        return output
    logits = getattr(output, "logits", None)
    first: torch.Tensor | list[torch.Tensor] = output[0] if logits is None else logits
    return torch.stack(first) if isinstance(first, list) else first


def make_step(
    model: nn.Module, inputs: Mapping[str, Any], *, training: bool, valid: torch.Tensor | None = None
) -> Step:
    """One call of a (compiled) model: a forward without gradients, or forward, loss and backward. Returns the main output.

    valid: bool (batch, seqlen), the positions that count; None: all. Padding has no label: what a model computes there is nobody's.
    The loss is the output's product with fixed noise: every position counts alike, and unlike a mean square it does not vanish after a
    norm. The optimizer is left out: it is no part of the compiled graph, and the same on both sides.
    """
    if not training:

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return main_output(model(**inputs))

        return forward

    noise: list[torch.Tensor] = []

    def forward_backward() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        output = main_output(model(**inputs))
        if not noise:
            generator = torch.Generator().manual_seed(1)
            made = torch.randn(output.shape, generator=generator).to(output.device) / output[..., 0].numel()
            noise.append(made if valid is None else made * valid[..., None])
        torch.autograd.backward((output.float() * noise[0]).sum())
        return output.detach()

    return forward_backward


def timing_columns(times: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """The p20, p50 and p80 of every side, and the ratio of the baseline to ours."""
    columns = {"rounds": str(len(times[BACKEND]))}
    for name, values in times.items():
        for label, value in zip(("p20", "p50", "p80"), percentiles(values), strict=True):
            columns[f"{name}_{label}_ms"] = f"{value:.4g}"
    return columns | {"ratio": f"{ratio(times[BASELINE], times[BACKEND]):.3f}"}


def environment(device: str, commit: str | None = None) -> dict[str, str]:
    """Columns that say where and with what a row was measured."""
    import transformers

    # Late, so that what measures our imports finds nothing of us imported.
    import attn_compiler
    from attn_compiler.reporting.doctor import cpu_name

    on_gpu = device != "cpu"
    cudnn = torch.backends.cudnn.version() if on_gpu else None
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit or _commit(),
        "device": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "threads": str(torch.get_num_threads()),
        "attn_compiler": attn_compiler.__version__,
        "torch": torch.__version__,
        "cuda": (torch.version.cuda or "") if on_gpu else "",
        "cudnn": str(cudnn or ""),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _commit() -> str:
    """The short commit, with "-dirty" where tracked files differ from it; "unknown" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def read(path: Path, *, missing_ok: bool = False) -> list[dict[str, str]]:
    """The rows of a file; missing_ok: none if there is no such file."""
    if missing_ok and not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def replace_rows(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> None:
    """Put rows into a file that is there, in place of its rows of the same cases."""
    cases = {row["case"] for row in rows}
    kept = [row for row in read(path) if row["case"] not in cases]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, *rows])


def add_output(parser: argparse.ArgumentParser, path: Path) -> None:
    """Add the options of `opened`."""
    parser.add_argument("--output", type=Path, default=path)
    parser.add_argument("--append", action="store_true", help="keep the file's rows, of another commit say")
    parser.add_argument("--commit", help="the commit to name in the rows, where this is no checkout")


def opened(options: argparse.Namespace, columns: Sequence[str], device: str) -> tuple[CsvFile, dict[str, str]]:
    """Return the file that the options name, and the columns that say where its rows are measured."""
    where = environment(device, options.commit)
    return CsvFile(options.output, [*columns, *where], append=options.append), where


class CsvFile:
    """Rows that are on disk as soon as they are added, so that a run that is cut off keeps what it measured."""

    def __init__(self, path: Path, columns: Sequence[str], *, append: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.rows: list[Mapping[str, str]] = []
        self._columns = list(columns)
        if append and path.exists():
            self.rows.extend(read(path))
        else:
            with path.open("w", newline="") as file:
                csv.DictWriter(file, self._columns).writeheader()

    def add(self, row: Mapping[str, str]) -> None:
        """Append a row. Raises ValueError for a column that the file has not."""
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)
        self.rows.append(row)


def print_table(rows: Sequence[Mapping[str, str]], names: Sequence[str]) -> None:
    """The rows for people: what was measured (`names`), the medians of both sides, the ratio, and whether the numbers are right."""
    table = Table(title="milliseconds, medians; ratio above 1: we are faster")
    for name in (*names, BASELINE, "ours", "ratio", "numerics"):
        table.add_column(name)
    for row in rows:
        cells = [row.get(name, "") for name in names]
        if row.get("failure"):
            table.add_row(*cells, "", "", "", f"[red]{escape(row['failure'])}")
            continue
        slow = float(row["ratio"]) < MIN_RATIO
        table.add_row(
            *cells,
            row[f"{BASELINE}_p50_ms"],
            row[f"{BACKEND}_p50_ms"],
            f"[red]{row['ratio']}" if slow else row["ratio"],
            row["numerics"] if row["numerics"] == "ok" else f"[red]{row['numerics']}",
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def print_sides(
    rows: Sequence[Mapping[str, str]],
    names: Sequence[str],
    cell: Callable[[Mapping[str, Mapping[str, str]], str], str],
    *,
    title: str,
    width: int,
) -> None:
    """A line for each case, with a cell for each side. cell: of the rows of a case by their sides, and a side's name. width: without a
    terminal."""
    table = Table(title=title)
    for column in ("case", *names):
        table.add_column(column)
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = {row["side"]: row for row in rows if row["case"] == case}
        table.add_row(case, *(cell(of_case, name) for name in names))
    Console(width=None if sys.stdout.isatty() else width).print(table)


def failures(rows: Sequence[Mapping[str, str]]) -> int:
    """1 where a row is slower than the baseline beyond noise, or wrong; else 0: an exit status."""
    measured = [row for row in rows if not row.get("failure")]
    return int(any(float(row["ratio"]) < MIN_RATIO or row["numerics"] == "WRONG" for row in measured))
