"""Each file of the package has a file of tests at the same place, and is no longer than a reader bears.

`WITHOUT` are those that only tests of others reach: the list may only shrink.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attn_compiler

PACKAGE = Path(attn_compiler.__file__).parent
TESTS = Path(__file__).parent
MOST_LINES = 400

#: data for pages, with an example each, which tests/code_pages runs
PAGES = "code_pages"

WITHOUT = frozenset(
    {
        "passes/autograd_functions.py",
        "passes/columns.py",
        "passes/context_parallel/exchanging.py",
        "passes/context_parallel/following.py",
        "passes/context_parallel/layout.py",
        "passes/context_parallel/lookups.py",
        "passes/context_parallel/places.py",
        "passes/context_parallel/refusing.py",
        "passes/context_parallel/sites.py",
        "passes/dtensor_rules.py",
        "passes/fragment_keys.py",
        "passes/library_ops.py",
        "passes/patterns/steps.py",
        "passes/reading/borders.py",
        "passes/remembered.py",
        "passes/sole_reader.py",
        "passes/unpad/asked_sizes.py",
        "passes/unpad/forms.py",
        "passes/unpad/making.py",
        "passes/unpad/masks.py",
        "passes/unpad/outcome.py",
        "passes/unpad/refusing.py",
        "passes/unpad/values.py",
        "rewrites/refusing.py",
    }
)


def _files() -> Iterator[Path]:
    """Those of the package, from its folder on."""
    return (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def _untested(files: Iterator[Path]) -> set[str]:
    wanted = (file for file in files if not file.name.startswith("__") and file.parts[0] != PAGES)
    return {file.as_posix() for file in wanted if not (TESTS / file.parent / f"test_{file.name}").exists()}


def test_every_file_has_tests_at_its_place() -> None:
    assert sorted(_untested(_files()) - WITHOUT) == []


def test_files_that_got_tests_are_off_the_list() -> None:
    assert sorted(WITHOUT - _untested(_files())) == []


def test_a_file_without_tests_is_seen() -> None:
    assert _untested(iter([Path("masks.py"), Path("nothing.py"), Path("code_pages/nothing.py")])) == {"nothing.py"}


def test_no_file_is_long() -> None:
    lines = {file.as_posix(): len((PACKAGE / file).read_text().splitlines()) for file in _files()}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}
