"""Each room of the package has tests at the same place, and no file is longer than a reader bears.

A room is a folder with code in it. Its tests are a folder of the same name, by subject and not by file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import attn_compiler

PACKAGE = Path(attn_compiler.__file__).parent
TESTS = Path(__file__).parent
MOST_LINES = 400

#: rooms without a folder of tests, and why
WITHOUT: dict[str, str] = {}

#: files of tests that are longer, and by how much: the list may only shrink
LONG = {
    "export/test_rewriting.py": 448,
    "fuzz/grammar/scores.py": 462,
    "lowerings/cudnn/test_fp8.py": 413,
    "lowerings/decode/problems.py": 472,
    "lowerings/decode/test_gathered.py": 473,
    "lowerings/shared/kernels/gluon_in_torch.py": 414,
    "lowerings/shared/parts/test_part_tensors.py": 418,
    "near_miss/test_kept.py": 556,
    "near_miss/test_scores.py": 579,
    "near_miss/test_weights.py": 445,
    "passes/graph/test_unit.py": 404,
    "passes/matching/patterns/test_softmax_chain.py": 572,
    "passes/matching/test_written_out.py": 408,
    "passes/recovering/test_latent.py": 424,
    "passes/recovering/test_score_kinds.py": 430,
    "passes/rewrites/test_init.py": 405,
    "passes/writing/test_keyless_nodes.py": 420,
    "test_always_runs.py": 432,
    "test_fp8_training.py": 438,
}


def _rooms() -> Iterator[str]:
    """List the folders of the package that define something."""
    for folder in sorted({path.parent for path in PACKAGE.rglob("*.py")}):
        if any(map(_defines, folder.glob("*.py"))):
            yield folder.relative_to(PACKAGE).as_posix()


def _defines(path: Path) -> bool:
    nodes = ast.walk(ast.parse(path.read_text()))
    return any(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) for node in nodes)


def _has_tests(room: str) -> bool:
    return any("def test_" in path.read_text() for path in (TESTS / room).glob("test_*.py"))


def _long(folder: Path) -> dict[str, int]:
    lines = {path.relative_to(folder).as_posix(): len(path.read_text().splitlines()) for path in folder.rglob("*.py")}
    return {name: count for name, count in lines.items() if count > MOST_LINES}


def test_every_room_has_tests() -> None:
    assert {room for room in _rooms() if not _has_tests(room)} == WITHOUT.keys()


def test_rooms_and_their_tests_are_seen() -> None:
    rooms = set(_rooms())
    assert {".", "spec", "verifying", "lowerings/fa4"} <= rooms
    assert "lowerings/shared" not in rooms, "it holds rooms and defines nothing itself"
    assert not _has_tests("nothing")
    assert not _has_tests("lowerings/shared"), "helpers of tests are no tests"


def test_no_file_is_long() -> None:
    assert _long(PACKAGE) == {}


def test_no_file_of_tests_grows_long() -> None:
    found = _long(TESTS)
    assert found.keys() == LONG.keys()
    assert {name: count for name, count in found.items() if count > LONG[name]} == {}
