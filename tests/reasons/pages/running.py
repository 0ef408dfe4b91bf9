"""The examples of one module of pages, for that module's own tests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from attn_compiler.reasons.pages import ExampleKind, Page

ROOT = Path(__file__).parents[3]


def each(pages: Sequence[Page]) -> Any:
    """A test of each page whose example can be run."""
    run = [page for page in pages if page.kind is not ExampleKind.TOLD]
    return pytest.mark.parametrize("page", run, ids=lambda page: str(page.code))


def gives_its_code(page: Page) -> bool:
    # Imported here: with it come torch and the passes.
    from website.examples import own_line

    return own_line(page) is not None


def groups(pages: Sequence[Page]) -> set[str]:
    """The groups of codes, such as AC2xx."""
    return {f"{str(page.code)[:3]}xx" for page in pages}


def files_told(pages: Sequence[Page]) -> list[Path]:
    """The files and folders of this project that examples in words name."""
    told = [page.example for page in pages if page.kind is ExampleKind.TOLD]
    return [ROOT / path.rstrip(".") for text in told for path in re.findall(r"\b(?:tests|benchmarks)/[\w/.]+", text)]
