"""The whole survey in one command: `python -m tests.hf --out survey` writes survey.csv, and exits 1 on a failure."""

from __future__ import annotations

import argparse
import importlib.metadata
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tests.hf.survey import Case, Result, cases, run_or_tell, why_absent
from tests.hf.table import write_csv


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen cases in `--jobs` processes; returns the exit status."""
    options = _parse(arguments)
    console = Console()
    if options.packages is not None:
        _prefer(options.packages)
    chosen = [case for case in cases() if all(word in case.id for word in options.only)]
    if not chosen:
        console.print(f"no case has {' and '.join(options.only)} in its name")
        return 2
    results = {
        case: Result(case=case, status="absent", detail=why or "") for case in chosen if (why := why_absent(case))
    }
    for result in _run_all([case for case in chosen if case not in results], options.jobs, console):
        results[result.case] = result
        if result.failed:
            console.print(
                f"{result.status}  {result.case.id}  {result.detail.splitlines()[0]}", markup=False, soft_wrap=True
            )
    ordered = [results[case] for case in chosen]
    if options.out is not None:
        write_csv(ordered, options.out.with_suffix(".csv"))
        console.print(versions())
    console.print(_totals(ordered))
    return int(any(result.failed for result in ordered))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.hf", description=__doc__)
    parser.add_argument("--out", type=Path, help="path of the table, without a suffix")
    parser.add_argument("--jobs", type=int, default=max(1, os.cpu_count() or 1), help="processes (default: one a core)")
    parser.add_argument(
        "--packages",
        type=Path,
        metavar="FOLDER",
        help="take packages from here first, such as another release: pip install --target FOLDER 'transformers==4.57.*'",
    )
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="run cases with WORD in their name")
    return parser.parse_args(arguments)


def _prefer(packages: Path) -> None:
    """Take packages from this folder before any other, in this process and in those that it starts."""
    folder = str(packages.resolve())
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])


def _run_all(chosen: Sequence[Case], jobs: int, console: Console) -> Iterator[Result]:
    """Results as they come. Workers are fresh processes that serve many cases, so that libraries are imported once in each."""
    # Tiny models gain nothing from threads, and `jobs` processes with a thread a core each would fight over the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    context = multiprocessing.get_context("spawn")
    with (
        Progress(*columns, console=console) as progress,
        ProcessPoolExecutor(jobs, mp_context=context) as pool,
    ):
        task = progress.add_task("survey", total=len(chosen))
        for future in as_completed([pool.submit(run_or_tell, case) for case in chosen]):
            result = future.result()
            progress.update(task, advance=1, description=result.case.id)
            yield result


def _totals(results: Sequence[Result]) -> Table:
    """One row a status."""
    table = Table("status", "cases", "sites found", "sites in the models")
    for status in sorted({result.status for result in results}):
        group = [result for result in results if result.status == status]
        table.add_row(status, str(len(group)), str(sum(r.found for r in group)), str(sum(r.expected for r in group)))
    return table


def versions() -> str:
    """The releases of what models are made with, or that there is none."""
    found = []
    for package in ("torch", "transformers", "diffusers", "timm"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


if __name__ == "__main__":
    sys.exit(main())
