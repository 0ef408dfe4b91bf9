"""Which module of the package imports which, read from the source."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "attn_compiler"

#: a class of a lowering in lowerings/homes.py
_CLASS = re.compile(r"([a-z0-9_]+\.[a-z0-9_]+)\.([A-Z]\w+)")

Graph = Mapping[str, frozenset[str]]
Statements = Callable[[list[ast.stmt]], Iterator[ast.stmt]]


@functools.cache
def graph() -> Graph:
    """Module -> the modules that it imports when it is imported itself. What a function imports, or a type checker, does not count."""
    return _graph(_at_import)


@functools.cache
def reading_graph() -> Graph:
    """Module -> all modules that it imports anywhere: what somebody who reads it meets."""
    return _graph(_anywhere)


def rooms(graph: Graph, folder: str) -> Graph:
    """File or folder of a folder of the package, by its name there -> the others there that it imports. folder: as a dotted name."""
    found: dict[str, set[str]] = {}
    for module, imported in graph.items():
        if (room := _room(module, folder)) is not None:
            others = {_room(name, folder) for name in imported} - {None, room}
            found.setdefault(room, set()).update(other for other in others if other is not None)
    return {room: frozenset(others) for room, others in found.items()}


def affected(room: str) -> list[str]:
    """List the tests of a room and of the rooms that import it directly. room: a folder of the package, as "passes/recovering"."""
    inside = f"{PACKAGE}.{room.replace('/', '.')}"
    if not (ROOT / PACKAGE / room).is_dir():
        raise SystemExit(f"{PACKAGE}/{room} is no folder")
    files = {_dotted(path): path for path in (ROOT / PACKAGE).rglob("*.py")}
    readers = {
        files[name].parent for name, those in reading_graph().items() if any(_is_of(each, inside) for each in those)
    }
    # The package's own door imports a little of everything, and its tests are of whole models.
    folders = {each.relative_to(ROOT / PACKAGE).as_posix() for each in readers - {ROOT / PACKAGE}} - {room}
    return [
        f"tests/{room}",
        *(name for folder in sorted(folders) if not folder.startswith(f"{room}/") for name in _own(folder)),
    ]


def _is_of(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def _own(folder: str) -> list[str]:
    """List a folder of tests, or its files where it holds folders of other rooms."""
    inside = ROOT / "tests" / folder
    if not any(inside.glob("*/test_*.py")):
        return [f"tests/{folder}"] if inside.is_dir() else []
    return sorted(path.relative_to(ROOT).as_posix() for path in inside.glob("test_*.py"))


def _room(module: str, folder: str) -> str | None:
    if module == folder:
        return "__init__"
    inside = module.removeprefix(f"{folder}.")
    return None if inside == module else inside.split(".")[0]


def _graph(statements: Statements) -> Graph:
    files = {_dotted(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}
    return {name: frozenset(_imported(path, files, statements)) - {name} for name, path in files.items()}


def circles(graph: Graph) -> list[list[str]]:
    """Modules that import each other, over any number of steps: each set once."""
    reached = {name: _reached(name, graph) for name in graph}
    found = {frozenset({a, *(b for b in reached[a] if a in reached[b])}) for a in graph if a in reached[a]}
    return sorted(map(sorted, found))


def _reached(start: str, graph: Graph) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph[name]
    return seen


def _dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(path: Path, files: Mapping[str, Path], statements: Statements) -> Iterator[str]:
    for node in statements(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                if inside in files:
                    yield inside
                elif node.module in files:
                    yield node.module


def _at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        for inner in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _at_import(getattr(node, inner, []))


def _anywhere(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.Constant) and (found := _CLASS.fullmatch(str(node.value))):
            yield ast.ImportFrom(f"{PACKAGE}.lowerings.{found[1]}", [ast.alias(found[2])], 0)


def main() -> None:
    """Print rooms, arrows and circles of each folder, or the tests of one room: python -m tests.imports [passes/recovering]"""
    if len(sys.argv) > 1:
        sys.stdout.write(" ".join(affected(sys.argv[1])) + "\n")
        return
    found = reading_graph()
    folders = sorted({name.rpartition(".")[0] for name in found if "." in name})
    for folder in folders:
        inside = rooms(found, folder)
        words = ", ".join(" ".join(circle) for circle in circles(inside)) or "none"
        sys.stdout.write(f"{folder}: {len(inside)} rooms, {sum(map(len, inside.values()))} arrows, circles: {words}\n")


if __name__ == "__main__":
    main()
