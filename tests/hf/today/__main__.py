"""`python -m tests.hf.today --out docs/models` writes a table of models that people download now, for the site."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.console import Console

from tests.hf.__main__ import versions
from tests.hf.today.every import MODELS, is_failed, rows_of
from tests.hf.today.running import Row
from tests.hf.today.table import write_csv


def main(arguments: Sequence[str] | None = None) -> int:
    """Exits with 1 where a model fails, or an attention is neither found nor told as a miss."""
    options = _parse(arguments)
    console = Console()
    names = [model.name for model in MODELS if any(word.lower() in model.name.lower() for word in options.only or [""])]
    if not names:
        console.print(f"no model has {' or '.join(options.only)} in its name")
        return 2
    found: list[Row] = []
    # Tiny models gain nothing from threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for of_model in pool.map(rows_of, names):
            found += of_model
            for row in of_model:
                said = f"{row.model}, {row.call}: {row.status} {row.found}/{row.total} {row.detail}"
                console.print(said, markup=False, soft_wrap=True)
    if options.out is not None:
        write_csv(found, options.out.with_suffix(".csv"))
        console.print(versions())
    return int(any(is_failed(row) for row in found))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.hf.today", description=__doc__)
    parser.add_argument("--out", type=Path, help="path of the table, without a suffix")
    parser.add_argument("--jobs", type=int, default=max(1, os.cpu_count() or 1), help="processes (default: one a core)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD", help="run models with WORD in their name"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
