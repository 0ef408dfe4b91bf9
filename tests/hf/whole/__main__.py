"""`python -m tests.hf.whole --out docs/transformers` surveys every modelling file of the installed transformers that has an attention.

The table is written as rows come, and what it has is not run again: remove it for a new one, or say --again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console

from tests.hf.__main__ import versions
from tests.hf.today.running import Row
from tests.hf.today.table import read_csv, write_csv
from tests.hf.whole.packages import PACKAGES, is_late, rows_of, units
from tests.hf.whole.totals import is_failed, is_waiting, lines, not_yet


def main(arguments: Sequence[str] | None = None) -> int:
    """Exits with 1 where a model fails, or an attention is neither found nor told as a miss."""
    options = _parse(arguments)
    console = Console()
    chosen = [name for name in units(options.package) if any(word in name for word in options.only or [""])]
    if not chosen:
        console.print(f"nothing of {options.package} has {' or '.join(options.only)} in its name")
        return 2
    out = options.out and options.out.with_suffix(".csv")
    kept = {name: rows for name, rows in _kept(out).items() if not (options.again and any(map(_is_lacking, rows)))}
    # A run that is cut off is a sample, and not the first letters.
    left = sorted((name for name in chosen if name not in kept), key=lambda name: zlib.crc32(name.encode()))
    for name, rows in _run(left, options):
        kept[name] = rows
        for row in filter(is_failed, rows):
            said = f"{row.model}, {row.call}: {row.status} {row.found}/{row.total} {row.detail}"
            console.print(said, markup=False, soft_wrap=True)
        if out:
            write_csv(_ordered({name: [not_yet(name)] for name in chosen} | kept), out)
    console.print(versions())
    console.print("\n".join(lines(_ordered(kept))), markup=False, soft_wrap=True)
    return int(any(is_failed(row) for row in _ordered(kept)))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.hf.whole", description=__doc__)
    parser.add_argument("--package", choices=tuple(PACKAGES), default="transformers", help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="path of the table, without a suffix")
    parser.add_argument("--jobs", type=int, default=max(1, os.cpu_count() or 1), help="processes (default: one a core)")
    parser.add_argument(
        "--limit", type=int, default=120, metavar="SECONDS", help="of the processor for a file or model (%(default)s)"
    )
    parser.add_argument("--again", action="store_true", help="run what the table has no full rows of again")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="what has WORD in its name")
    return parser.parse_args(arguments)


def _kept(out: Path | None) -> dict[str, list[Row]]:
    """Rows of an earlier run, by the file or model that they are of."""
    kept: dict[str, list[Row]] = {}
    for row in read_csv(out) if out and out.exists() else ():
        kept.setdefault(row.model.partition(" ")[0], []).append(row)
    return {name: rows for name, rows in kept.items() if not any(map(is_waiting, rows))}


def _is_lacking(row: Row) -> bool:
    return row.status != "ok"


def _ordered(kept: dict[str, list[Row]]) -> list[Row]:
    return [row for name in sorted(kept) for row in kept[name]]


def _run(chosen: Sequence[str], options: argparse.Namespace) -> Iterator[tuple[str, list[Row]]]:
    # Tiny models gain nothing from threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    left = list(chosen)
    while left:
        with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            pending = {pool.submit(rows_of, options.package, name, options.limit): name for name in left}
            for future in as_completed(pending):
                rows = future.result()
                left.remove(pending[future])
                yield pending[future], rows
                if any(is_late(row) for row in rows):
                    # What was cut off leaves PyTorch's state in the process as it was.
                    pool.shutdown(wait=True, cancel_futures=True)
                    break


if __name__ == "__main__":
    sys.exit(main())
