"""A public class is known by its name alone: no two of the package share one, whatever their modules."""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterable, Iterator, Mapping

from tests import imports


def _classes(source: str) -> Iterator[str]:
    """The public classes of a module, those inside of others too."""
    found = (node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
    return (name for name in found if not name.startswith("_"))


def _shared(sources: Iterable[tuple[str, str]]) -> Mapping[str, list[str]]:
    """Name -> the modules that have a class of that name, where there are several."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for module, source in sources:
        for name in _classes(source):
            found[name].append(module)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_no_two_public_classes_have_one_name() -> None:
    files = sorted((imports.ROOT / imports.PACKAGE).rglob("*.py"))
    assert _shared((path.relative_to(imports.ROOT).as_posix(), path.read_text()) for path in files) == {}


def test_a_name_that_two_modules_give_is_seen() -> None:
    one = "class Plan: ...\nclass _Own: ...\n"
    two = "class Row:\n    class Plan: ...\nclass _Own: ...\n"
    assert _shared([("one", one), ("two", two)]) == {"Plan": ["one", "two"]}
