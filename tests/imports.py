"""Which module of the package imports which, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "attn_compiler"

Graph = Mapping[str, frozenset[str]]


def graph() -> Graph:
    """Module -> the modules that it imports when it is imported itself. What a function imports, or a type checker, does not count."""
    files = {_dotted(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}
    return {name: frozenset(_imported(path, files)) - {name} for name, path in files.items()}


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


def _imported(path: Path, files: Mapping[str, Path]) -> Iterator[str]:
    for node in _at_import(ast.parse(path.read_text()).body):
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
