"""How kernels make and read the named tuples that they take: read from their source, since Triton's functions can't be called here."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any


def tuples(module: ModuleType) -> dict[str, type[Any]]:
    """The named tuples that a module defines."""
    own = {name: kind for name, kind in vars(module).items() if getattr(kind, "__module__", None) == module.__name__}
    return {name: kind for name, kind in own.items() if inspect.isclass(kind) and hasattr(kind, "_fields")}


def imports(module: ModuleType) -> list[str]:
    """What a module imports, at its top or in a function."""
    found: list[str] = []
    for node in ast.walk(_tree(Path(str(module.__file__)))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(str(node.module))
    return found


def made_by_position(kinds: dict[str, type[Any]], *files: Path) -> list[str]:
    """Where one of the tuples is made with a field that is not named, or with names that are not exactly its fields."""
    found = []
    for path, call in _calls(files):
        kind = kinds.get(call.func.id) if isinstance(call.func, ast.Name) else None
        if kind is None:
            continue
        unpacked = any(word.arg is None for word in call.keywords)
        names = {word.arg for word in call.keywords if word.arg is not None}
        if call.args or not names <= set(kind._fields) or (not unpacked and names != set(kind._fields)):
            found.append(f"{path.name}:{call.lineno} {kind.__name__}")
    return found


def unread(kinds: dict[str, type[Any]], *files: Path) -> list[str]:
    """Fields that no kernel reads."""
    read = {node.attr for path in files for node in ast.walk(_tree(path)) if isinstance(node, ast.Attribute)}
    return [f"{name}.{field}" for name, kind in kinds.items() for field in kind._fields if field not in read]


def _calls(files: tuple[Path, ...]) -> Iterator[tuple[Path, ast.Call]]:
    for path in files:
        yield from ((path, node) for node in ast.walk(_tree(path)) if isinstance(node, ast.Call))


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())
