"""Which of our functions a program runs: every function of the package notes that it was called, by an import hook."""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.fuzz.planted.fault import KERNELS, PACKAGE

#: (file in the package, first line) of every function that was called since this was last emptied
ran: set[tuple[str, int]] = set()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != "attn_compiler":
            return None
        file = PACKAGE.joinpath(*name.split(".")[1:])
        found = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
        if not found.exists() or KERNELS in str(found):
            return None
        locations = [str(found.parent)] if found.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(name, found, loader=self, submodule_search_locations=locations)

    def exec_module(self, module: ModuleType) -> None:
        path = Path(str(module.__file__))
        tree = ast.parse(path.read_text())
        file = str(path.relative_to(PACKAGE))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                note = ast.parse(f"__ran__.add(({file!r}, {first}))").body[0]
                at = 1 if ast.get_docstring(node) is not None else 0
                node.body.insert(at, ast.fix_missing_locations(ast.copy_location(note, node)))
        module.__dict__["__ran__"] = ran
        exec(compile(tree, str(path), "exec"), module.__dict__)


def install() -> None:
    """Before the package is imported; does nothing the second time."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
