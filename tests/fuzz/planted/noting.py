"""Which of our statements a program runs: every statement in a function of the package notes that it is reached, by an import hook."""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.fuzz.planted.fault import KERNELS, PACKAGE, first_line

#: (file in the package, line) of every statement in a function that was reached since this was last emptied. A function's own line, of its
#: first decorator if it has one, stands for a call of it.
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
        for node in [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]:
            _note(node, file)
        module.__dict__.update(__ran__=ran, __traced__=torch.compiler.is_dynamo_compiling)
        exec(compile(tree, str(path), "exec"), module.__dict__)


def _note(function: ast.FunctionDef, file: str) -> None:
    at = 1 if ast.get_docstring(function) is not None else 0
    docstring, body = function.body[:at], function.body[at:]
    function.body = [*docstring, _noted(file, first_line(function), function), *_with_notes(body, file)]


def _with_notes(body: list[ast.stmt], file: str) -> list[ast.stmt]:
    """The statements of a function, and those in them, each behind its note. Functions in it have their own turn."""
    found: list[ast.stmt] = []
    for statement in body:
        found += [_noted(file, statement.lineno, statement), statement]
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue
        for part in ("body", "orelse", "finalbody"):
            if getattr(statement, part, None):
                setattr(statement, part, _with_notes(getattr(statement, part), file))
        for branch in [*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]:
            branch.body = _with_notes(branch.body, file)
    return found


def _noted(file: str, line: int, where: ast.stmt) -> ast.stmt:
    # Where Dynamo traces a function, its write of a set would be done at each call, in the place of all that was noted since.
    note = ast.parse(f"__traced__() or __ran__.add(({file!r}, {line}))").body[0]
    return ast.fix_missing_locations(ast.copy_location(note, where))


def install() -> None:
    """Before the package is imported; does nothing the second time."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
