"""Rows of a test's own in place of those that were measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock


@contextmanager
def rows_from(module: Any, lines: str, folder: Path) -> Iterator[None]:
    """A module of choice/ reads these lines within the block. folder: for its file."""
    path = folder / "rows.csv"
    path.write_text(lines)
    with mock.patch.object(module, "MEASURED", path):
        module.rows.cache_clear()
        yield
    module.rows.cache_clear()
