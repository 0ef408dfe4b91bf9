"""A planted fault: a small change of our own code that makes some result wrong, and how it is put into a process.

`plant` is an import hook, which has to stand before the package is imported: what is built of the changed code is changed, too.
`swap` changes a function of a package that is there, which spares the import.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

PACKAGE = Path(__file__).parents[3] / "attn_compiler"

#: folders of what Triton reads the text of
KERNELS = "/kernels/"

_Cached = functools._lru_cache_wrapper
#: the second line of a paragraph of `faults`
_PLACE = re.compile(r"(?P<file>\S+)(?: (?P<within>\w+))?; (?P<rule>[^:]+): (?P<why>.+)")


class DoesNotApply(Exception):
    """The code that a planted fault changes is not there any more; the text names the fault."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """file: in the package. within: the function or class that `old` stands in (once; None: in the file). rule: what is broken.

    why: what comes out wrong.
    """

    name: str
    file: str
    within: str | None
    old: str
    new: str
    rule: str
    why: str

    def source(self) -> str:
        """The whole file with the fault. Raises DoesNotApply."""
        text = (PACKAGE / self.file).read_text()
        first, last = self._span(text)
        part = text[first:last]
        if part.count(self.old) != 1:
            raise DoesNotApply(
                f"the planted fault {self.name!r} changes {self.old!r} in {self.within or 'all'} of {self.file}, "
                f"which has it {part.count(self.old)} times: bring the fault up to date, or take it out"
            )
        return text[:first] + part.replace(self.old, self.new) + text[last:]

    def _span(self, text: str) -> tuple[int, int]:
        if self.within is None:
            return 0, len(text)
        lines = text.splitlines(keepends=True)
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line))
        for node in _definitions(text):
            if node.name == self.within:
                return starts[node.lineno - 1], starts[node.end_lineno or node.lineno]
        raise DoesNotApply(f"the planted fault {self.name!r} is in {self.within} of {self.file}, which is no more")

    @property
    def module(self) -> str:
        return ".".join(["attn_compiler", *Path(self.file).with_suffix("").parts]).removesuffix(".__init__")

    def place(self) -> int | None:
        """The line of the innermost statement in a function that is changed, as `noting` has it; None outside of all functions."""
        text = (PACKAGE / self.file).read_text()
        first, last = self._span(text)
        at = first + text[first:last].index(self.old)
        line = text.count("\n", 0, at + len(self.old) - len(self.old.lstrip())) + 1
        best: int | None = None
        for function in _definitions(text):
            if isinstance(function, ast.FunctionDef) and function.lineno <= line <= (function.end_lineno or 0):
                inside = [n for n in ast.walk(function) if isinstance(n, ast.stmt) and n is not function]
                around = [n.lineno for n in inside if n.lineno <= line <= (n.end_lineno or 0)]
                best = max(best or 0, *around, first_line(function))
        return best


def faults(text: str) -> tuple[Fault, ...]:
    """Of a text with a paragraph for each: its name; its file and what it is within, "; ", its rule, ": ", and why; then, as a difference,
    lines of "- " with what is there, and of "+ " with what comes in its place. Raises ValueError."""
    return tuple(_of_paragraph(each) for each in text.strip("\n").split("\n\n"))


def _of_paragraph(text: str) -> Fault:
    name, place, *changed = text.split("\n")
    found = _PLACE.fullmatch(place)
    old, new = ("\n".join(line[2:] for line in changed if line.startswith(sign)) for sign in ("- ", "+ "))
    if found is None or not old or any(line[:2] not in ("- ", "+ ") for line in changed):
        raise ValueError(f"this is no planted fault:\n{text}")
    return Fault(name=name, old=old, new=new, **found.groupdict())


@functools.lru_cache(maxsize=8)
def _definitions(text: str) -> list[ast.FunctionDef | ast.ClassDef]:
    """Of a file, as `ast.walk` comes to them. Faults of one file come one after another."""
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def first_line(function: ast.FunctionDef) -> int:
    """As code objects have it: that of the first decorator."""
    return min([function.lineno, *(d.lineno for d in function.decorator_list)])


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._path = str(PACKAGE / fault.file)

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._fault.module:
            return None
        locations = [str(Path(self._path).parent)] if self._path.endswith("__init__.py") else None
        return importlib.util.spec_from_file_location(
            name, self._path, loader=self, submodule_search_locations=locations
        )

    def exec_module(self, module: ModuleType) -> None:
        source = self._fault.source()
        # Triton reads the text of its kernels.
        linecache.cache[self._path] = (len(source), None, source.splitlines(keepends=True), self._path)
        exec(compile(source, self._path, "exec"), module.__dict__)


def swap(fault: Fault) -> bool:
    """Put the fault into the functions of the package that there are, which was imported without it; False if it is in none.

    Every function that was made of the changed text gets the new code, whoever holds it; what was remembered is forgotten.
    """
    if fault.place() is None or KERNELS in fault.file:
        return False
    path = str(PACKAGE / fault.file)
    changed = {(c.co_firstlineno, c.co_name): c for c in _codes(compile(fault.source(), path, "exec"))}
    everything = gc.get_objects()
    count = 0
    for function in everything:
        if type(function) is FunctionType and function.__code__.co_filename == path:
            old = function.__code__
            new = changed.get((old.co_firstlineno, old.co_name))
            # A function inside of another one is changed in those that hold it, and in the one that makes it.
            if new is not None and new != old and new.co_freevars == old.co_freevars:
                function.__code__ = new
                count += 1
    for remembered in everything:
        if type(remembered) is _Cached and str(getattr(remembered, "__module__", "")).startswith("attn_compiler"):
            remembered.cache_clear()
    return count > 0


def _codes(code: CodeType) -> Iterator[CodeType]:
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield x
            yield from _codes(x)


def plant(fault: Fault) -> None:
    """Let the package be imported with the fault. Raises RuntimeError if it was imported already."""
    if any(name == "attn_compiler" or name.startswith("attn_compiler.") for name in sys.modules):
        raise RuntimeError("a fault is planted before the package is imported")
    fault.source()
    sys.meta_path.insert(0, _Finder(fault))
