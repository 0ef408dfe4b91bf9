"""Each file of the package has a file of tests at the same place, and is no longer than a reader bears.

A package's own file, `__init__.py`, has its tests in test_init.py if it defines a function or a class. Those of `__main__.py` are in
test_main.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import attn_compiler

PACKAGE = Path(attn_compiler.__file__).parent
TESTS = Path(__file__).parent
MOST_LINES = 400

_RAISED = "an exception that holds a reason: the tests of what raises it see its words"

_TABLE = "a line for each thing that it says in lowerings/test_what_families_take.py"

#: files without tests at their place, and why
WITHOUT: dict[str, str] = {
    **dict.fromkeys((f"lowerings/{family}/takes.py" for family in "cudnn decode fa4 hopper triton".split()), _TABLE),
    "lowerings/hopper/limits.py": _TABLE,
    "passes/context_parallel/refusing.py": _RAISED,
    "passes/matching/patterns/steps.py": "fields alone: test_score_steps.py fills them, and test_score_chain.py adds them up",
    "passes/unpad/refusing.py": _RAISED,
    "passes/rewrites/refusing.py": _RAISED,
}


def _files() -> Iterator[Path]:
    """Those of the package, from its folder on, that have something to prove."""
    for path in PACKAGE.rglob("*.py"):
        if path.name != "__init__.py" or _defines(path):
            yield path.relative_to(PACKAGE)


def _defines(path: Path) -> bool:
    nodes = ast.walk(ast.parse(path.read_text()))
    return any(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) for node in nodes)


def _untested(files: Iterator[Path]) -> set[str]:
    return {file.as_posix() for file in files if not (TESTS / file.parent / f"test_{file.stem.strip('_')}.py").exists()}


def test_every_file_has_tests_at_its_place() -> None:
    assert sorted(_untested(_files()) - WITHOUT.keys()) == []


def test_files_that_got_tests_are_off_the_list() -> None:
    assert sorted(WITHOUT.keys() - _untested(_files())) == []


def test_a_file_without_tests_is_seen() -> None:
    files = [
        "spec/masks.py",
        "nothing.py",
        "__main__.py",
        "verifying/__init__.py",
        "reporting/page/__init__.py",
        "code_pages/nothing.py",
    ]
    assert _untested(map(Path, files)) == {"nothing.py", "reporting/page/__init__.py", "code_pages/nothing.py"}


def test_a_package_that_defines_nothing_needs_no_tests() -> None:
    found = {file.as_posix() for file in _files()}
    assert "verifying/__init__.py" in found
    assert "reporting/page/__init__.py" not in found


def test_no_file_is_long() -> None:
    lines = {path.relative_to(PACKAGE).as_posix(): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}
