"""Packages that are surveyed as a whole: what each is made of, and the rows of one part of it."""

from __future__ import annotations

import functools
import logging
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.hf.packages import Unavailable, import_package
from tests.hf.today.running import Row
from tests.hf.whole import files, of_diffusers, of_timm, of_x_transformers, running


@dataclass(frozen=True, kw_only=True)
class Package:
    """units(): names of files or models. rows(name): of one of them."""

    units: Callable[[], list[str]]
    rows: Callable[[str], Iterator[Row]]


_LONGER = "longer than"


class _Late(BaseException):
    """Not caught by models, nor by Dynamo."""


@functools.cache
def _files() -> Mapping[str, files.File]:
    return {file.name: file for file in files.files()}


PACKAGES: Mapping[str, Package] = {
    "transformers": Package(units=lambda: list(_files()), rows=lambda name: running.rows_of_file(_files()[name])),
    "timm": Package(units=of_timm.modules, rows=of_timm.rows),
    "x_transformers": Package(units=of_x_transformers.units, rows=of_x_transformers.rows),
    "diffusers": Package(units=of_diffusers.units, rows=of_diffusers.rows),
}


def units(package: str) -> list[str]:
    return PACKAGES[package].units()


def rows_of(package: str, name: str, limit: int) -> list[Row]:
    """In a process that serves many. What takes the processor longer than the limit is a row that says so."""
    warnings.filterwarnings("ignore")
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    signal.signal(signal.SIGPROF, _late)
    found: list[Row] = []
    try:
        import_package(package)
        # Again and again: what is raised while Python collects garbage is dropped.
        signal.setitimer(signal.ITIMER_PROF, limit, limit / 4)
        found.extend(PACKAGES[package].rows(name))
    except _Late:
        found.append(_row(name, f"{_LONGER} {limit} seconds"))
    except Unavailable as missing:
        found.append(_row(name, str(missing)))
    except Exception as error:  # noqa: BLE001 - one broken file is a row of the table, not the end of it
        found.append(_row(name, f"{type(error).__name__}: {error}"))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return found


def is_late(row: Row) -> bool:
    return row.detail.startswith(_LONGER)


def _row(name: str, why: str) -> Row:
    return Row(model=name, call="not built", device="meta", status="unavailable", detail=" ".join(why.split())[:300])


def _late(*_: Any) -> None:
    raise _Late
