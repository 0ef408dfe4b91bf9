"""A benchmark as data, and what every one of them shares: its command, its rows on disk, one way to time, and its table.

A `Bench` has cases, columns and options; `main = run(BENCH)` makes its command of it. A case has `names`, the columns that tell it from
others. Sides of a case are functions by name, timed in turn. How is `attn_compiler.compare`'s: attn_compiler/compiling/comparing/timing.py.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import fnmatch
import gc
import platform
import subprocess
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

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

RESULTS = Path(__file__).parent / "results"
BACKEND = "attn_compiler"
BASELINE = "inductor"
# A ratio (baseline's time over ours) below this is slower beyond noise.
MIN_RATIO = 0.98

#: distributions that are optional, and decide what can be chosen
EXTRAS = ("nvidia-cudnn-frontend", "flash-attn-4")

Step = Callable[[], torch.Tensor]
Row = Mapping[str, str]
#: the rows of one case after another
Measured = Iterator[Iterable[Row]]
#: of a command: its names, and what argparse knows of it
Option = tuple[tuple[str, ...], Mapping[str, Any]]
Main = Callable[..., int]
T = TypeVar("T")


class Named:
    """A case whose fields are what its rows call it."""

    @property
    def names(self) -> dict[str, str]:
        return {field.name: str(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]


def arg(*names: str, **settings: Any) -> Option:
    """An option, as argparse's `add_argument` takes it."""
    return names, settings


def command(doc: str | None, *options: Option, epilog: str = "") -> Callable[[Callable[[Namespace], int | None]], Main]:
    """Make a function of options a command: it takes words, those of the shell unless given, and returns an exit status."""

    def made(body: Callable[[Namespace], int | None]) -> Main:
        def main(arguments: Sequence[str] | None = None) -> int:
            form = argparse.RawDescriptionHelpFormatter
            parser = argparse.ArgumentParser(description=doc, epilog=epilog, formatter_class=form)
            for names, settings in options:
                parser.add_argument(*names, **settings)
            return body(parser.parse_args(arguments)) or 0

        return main

    return made


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What a benchmark is.

    doc: of its command. results: the file of benchmarks/results, unless told otherwise; it may depend on the options, as columns may.
    cases: those to measure, the most telling first. measure: the rows of one; or rows: of all of them, as they come. sides: by name,
    where they are known. devices: none: any, "cuda:0" by default; one: that; several: one of them. seconds: of timing a case.
    budget: seconds after which nothing begins. sized: small cases may be asked for. dry: all of it tiny, on a CPU.
    jobs: cases are prepared side by side (waves.py). together: each run adds to the file. again: all cases are measured beside
    kept rows, which are of other commits or options; else those that have no row of this device. where: columns that say where it
    ran, and with what. short: columns that are printed. begin: before anything is measured. forget: what a case leaves on a device.
    instead: an exit status in place of measuring, if any. failed: whether rows of this commit are not as they should be.
    """

    doc: str
    results: str | Callable[[Namespace], str]
    columns: Sequence[str] | Callable[[Namespace], Sequence[str]]
    cases: Callable[[Namespace], Iterable[Any]]
    measure: Callable[[Any, Namespace], Iterable[Row]] | None = None
    rows: Callable[[Sequence[Any], Namespace], Measured] | None = None
    sides: Iterable[str] = ()
    options: Sequence[Option] = ()
    devices: Sequence[str] = ()
    seconds: float | None = None
    budget: float | None = None
    sized: bool = False
    dry: bool = False
    jobs: bool = False
    together: bool = False
    again: bool = False
    where: Callable[[Namespace], dict[str, str]] | None = None
    short: Sequence[str] = ()
    begin: Callable[[Namespace], object] = lambda given: None
    forget: Callable[[str], None] = lambda device: forget(device)
    instead: Callable[[Namespace], int | None] = lambda given: None
    table: Callable[[Sequence[Row]], None] | None = None
    failed: Callable[[Sequence[Row]], bool] = lambda rows: any(row.get("failure") for row in rows)

    @property
    def every_option(self) -> list[Option]:
        """Those of all benchmarks that this one has, and its own."""
        seconds: dict[str, Any] = {"type": float, "help": "timing of one case (%(default)s)"}
        budget: dict[str, Any] = {"type": float, "help": "begin nothing after this (%(default)s)"}
        device: dict[str, Any] = (
            {"choices": self.devices, "default": self.devices[0]} if self.devices else {"default": "cuda:0"}
        )
        found = [
            (True, arg("--output", type=Path, help="the file of rows")),
            (True, arg("--append", action="store_true", help="keep the rows of the file and measure the others")),
            (True, arg("--commit", help="the commit to name in the rows, where this is no checkout")),
            (len(self.devices) != 1, arg("--device", **device)),
            (self.seconds is not None, arg("--seconds", default=self.seconds, **seconds)),
            (self.budget is not None, arg("--budget-seconds", default=self.budget, **budget)),
            (self.sized, arg("--size", choices=("full", "small"), default="full", help="small: for a look at the script")),
            (self.dry, arg("--dry-run", action="store_true", help="tiny, on a CPU; nothing is written but to --output")),
            (self.jobs, arg("--jobs", type=int, default=1, help="compile so many cases at a time (%(default)s)")),
            (self.jobs, arg("--wave-seconds", type=float, default=120.0, help="how long these may compile (%(default)s)")),
            (self.jobs, arg("--wave-cases", type=int, help="cases that are compiled before any is timed (as many as --jobs)")),
        ]  # fmt: skip
        return [*(option for has, option in found if has), *self.options]

    @property
    def epilog(self) -> str:
        """For --help: where rows go, and what they are of."""
        file = (
            f"Writes benchmarks/results/{self.results}, and prints a table last."
            if isinstance(self.results, str)
            else ""
        )
        return f"{file} Sides: {', '.join(self.sides)}" if self.sides else file

    def given(self, given: Namespace) -> Namespace:
        """The options with what follows from them: `device`; `until`, of time.monotonic(); `keep`: rows are for the file;
        `broken`: something has no row that should have one."""
        if len(self.devices) == 1:
            given.device = self.devices[0]
        given.keep, given.broken = True, False
        if getattr(given, "dry_run", False):
            given.device, given.keep = "cpu", given.output is not None
        given.size = getattr(given, "size", "full")
        given.begun = time.monotonic()
        given.until = given.begun + getattr(given, "budget_seconds", float("inf"))
        return given

    def named_columns(self, given: Namespace) -> Sequence[str]:
        """Those that a row has before where it was measured."""
        return self.columns(given) if callable(self.columns) else self.columns

    def file(self, given: Namespace) -> tuple[CsvFile, dict[str, str]]:
        """The file that the options name, and columns that say where its rows are measured."""
        where = (self.where or (lambda given: environment(given.device, given.commit)))(given)
        columns = self.named_columns(given)
        name = self.results(given) if callable(self.results) else self.results
        path = given.output or RESULTS / name if given.keep else None
        columns = [*columns, *(name for name in where if name not in columns)]
        return CsvFile(path, columns, append=given.append or self.together), where


def one_by_one(bench: Bench, cases: Sequence[Any], given: Namespace) -> Measured:
    """Rows of cases, one after another while there is time. What fails of a case is its row, and costs no other."""

    def guarded(case: Any) -> Iterator[Row]:
        assert bench.measure is not None
        try:
            yield from bench.measure(case, given)
        except Exception as error:
            if "failure" not in bench.named_columns(given):
                raise
            traceback.print_exc()
            yield {**case.names, "failure": failure(error)}

    for case in cases:
        if time.monotonic() > given.until:
            return
        yield guarded(case)
        bench.forget(given.device)


def run(bench: Bench) -> Main:
    """Make a benchmark's command: it measures what is not in its file yet, and writes, prints and judges it."""

    @command(bench.doc, *bench.every_option, epilog=bench.epilog)
    def main(given: Namespace) -> int:
        status = bench.instead(bench.given(given))
        if status is not None:
            return status
        bench.begin(given)
        file, where = bench.file(given)
        beside = bench.together or bench.again
        known = [row for row in file.rows if not beside and row.get("device") == where.get("device")]
        cases = [case for case in bench.cases(given) if not any(case.names.items() <= row.items() for row in known)]
        left = len(cases)
        for rows in bench.rows(cases, given) if bench.rows else one_by_one(bench, cases, given):
            left -= 1
            for row in rows:
                file.add({**row, **where})
                shown = {name: row.get(name, "") for name in bench.short} if bench.short else row
                took = f"{time.monotonic() - given.begun:4.0f} s"
                print(took, *(f"{name} {value}" for name, value in shown.items() if value), sep="  ", flush=True)
        if bench.table is not None and file.rows:
            bench.table(file.rows)
        elif bench.short and file.rows:
            lines = ([row.get(name, "") for name in bench.short] for row in file.rows)
            show(bench.doc.partition("\n")[0], bench.short, lines)
        if left > 0:
            print(f"{left} cases left for a run with --append")
        mine = [row for row in file.rows if row.get("commit") == where.get("commit")]
        return int(given.broken or bench.failed(mine))

    return main


def picked(cases: Iterable[T], patterns: Sequence[str], name: Callable[[T], str] = lambda case: case.name) -> list[T]:  # type: ignore[attr-defined]
    """Those whose name fits one of the patterns."""
    return [case for case in cases if any(fnmatch.fnmatch(name(case), pattern) for pattern in patterns)]


#: of benchmarks whose cases are asked for by name
PATTERNS = arg("--cases", nargs="*", default=["*"], metavar="PATTERN", help="names, or patterns like 'causal*'")


def failure(error: BaseException) -> str:
    """The first line of an error."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0] if said else ''}"[:200]


def forget(device: str) -> None:
    """Give back what a case left in memory, and compiled code, which counts against Dynamo's limit."""
    torch.compiler.reset()
    give_back(device)


def give_back(device: str) -> None:
    """What no tensor holds of the device's memory."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def extras() -> dict[str, str]:
    """EXTRAS that are installed, with their versions, as a column."""
    found = {
        name: distribution.version for distribution in metadata.distributions() if (name := distribution.name) in EXTRAS
    }
    return {"extras": " ".join(f"{name} {found[name]}" for name in EXTRAS if name in found)}


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


def several(step: Step, times: int) -> Step:
    """Call a step so often in a row. What it gave before is let go."""

    def run() -> torch.Tensor:
        for _ in range(times - 1):
            step()
        return step()

    return step if times == 1 else run


def kernel_times(values: Sequence[float], flops: float) -> dict[str, str]:
    """Columns of a kernel's microseconds."""
    p20, p50, p80 = (f"{value:.1f}" for value in percentiles(values))
    tflops = f"{flops / percentiles(values)[1] / 1e6:.1f}"
    return {"rounds": str(len(values)), "tflops": tflops, "p20_us": p20, "p50_us": p50, "p80_us": p80}


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
        "date": datetime.date.today().isoformat(), "commit": commit or _commit(),
        "device": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "threads": str(torch.get_num_threads()), "attn_compiler": attn_compiler.__version__,
        "torch": torch.__version__, "cuda": (torch.version.cuda or "") if on_gpu else "", "cudnn": str(cudnn or ""),
        "transformers": transformers.__version__, "python": platform.python_version(),
    }  # fmt: skip


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
    write(path, columns, [*kept, *rows])


def write(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], *, lineterminator: str = "\n") -> None:
    """Make a file of rows anew."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator=lineterminator)
        writer.writeheader()
        writer.writerows(rows)


class CsvFile:
    """Rows that are on disk as soon as they are added, so that a run that is cut off keeps what it measured."""

    def __init__(self, path: Path | None, columns: Sequence[str], *, append: bool = False) -> None:
        """path: None for a file that is not kept."""
        self.path = path
        self.rows: list[Row] = []
        self._columns = list(columns)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if append and path.exists():
            self.rows.extend(read(path))
        else:
            write(path, self._columns, [], lineterminator="\r\n")

    def add(self, row: Mapping[str, str]) -> None:
        """Append a row. Raises ValueError for a column that the file has not."""
        if set(row) - set(self._columns):
            raise ValueError(f"no such columns: {sorted(set(row) - set(self._columns))}")
        if self.path is not None:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(row)
        self.rows.append(row)


def show(title: str, names: Sequence[str], lines: Iterable[Sequence[str]], *, width: int = 160, said: str = "") -> None:
    """Print a table. width: without a terminal. said: below it."""
    table = Table(*names, title=title)
    for cells in lines:
        table.add_row(*cells)
    console = Console(width=None if sys.stdout.isatty() else width)
    console.print(table)
    if said:
        console.print(said)


def red(text: str, *, when: bool = True) -> str:
    """Mark what is not as it should be."""
    return f"[red]{text}[/]" if when and text else text


def marked(value: float | None, form: str, bad: Callable[[float], bool]) -> str:
    """A number, in red where it is bad; nothing for none."""
    return "" if value is None else red(format(value, form), when=bad(value))


def print_table(rows: Sequence[Row], names: Sequence[str]) -> None:
    """The rows for people: what was measured (`names`), the medians of both sides, the ratio, and whether the numbers are right."""

    def line(row: Row) -> list[str]:
        cells = [row.get(name, "") for name in names]
        if row.get("failure"):
            return [*cells, "", "", "", red(escape(row["failure"]))]
        ratio = red(row["ratio"], when=float(row["ratio"]) < MIN_RATIO)
        times = [row[f"{BASELINE}_p50_ms"], row[f"{BACKEND}_p50_ms"]]
        return [*cells, *times, ratio, red(row["numerics"], when=row["numerics"] != "ok")]

    title = "milliseconds, medians; ratio above 1: we are faster"
    show(title, (*names, BASELINE, "ours", "ratio", "numerics"), map(line, rows))


def print_sides(
    rows: Sequence[Row],
    cell: Callable[[Row], str],
    *,
    title: str,
    keys: Sequence[str] = ("case", "pass"),
    side: Callable[[Row], str] = lambda row: row["side"],
    further: Mapping[str, Callable[[Mapping[str, Row]], str]] | None = None,
    width: int = 180,
) -> None:
    """A line for each case, with a cell for each side. further: columns of all of a case's rows, by side."""
    names = list(dict.fromkeys(filter(None, map(side, rows))))
    cases: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(tuple(row.get(key, "") for key in keys), {})[side(row)] = row
    lines = (
        [
            *case,
            *(cell(sides[name]) if name in sides else "" for name in names),
            *(f(sides) for f in (further or {}).values()),
        ]
        for case, sides in cases.items()
    )
    show(title, (*keys, *names, *(further or {})), lines, width=width)


def speed(row: Row, *, wrong: bool = False) -> str:
    """The cell of a kernel: its TFLOP/s, or why there are none."""
    if row.get("failure"):
        return f"[yellow]{escape(row['failure'][:24])}[/]"
    return red(row.get("tflops", "") + " WRONG" * wrong, when=wrong)


def failures(rows: Sequence[Row]) -> int:
    """1 where a row is slower than the baseline beyond noise, or wrong; else 0: an exit status."""
    measured = [row for row in rows if not row.get("failure")]
    return int(any(float(row["ratio"]) < MIN_RATIO or row["numerics"] == "WRONG" for row in measured))
