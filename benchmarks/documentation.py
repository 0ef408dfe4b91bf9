"""Real text of any size, from what is installed: the documentation in the source files of the standard library and of packages.

    python -m benchmarks.documentation text.zip

writes it down, for runs on other machines. Files in the order of their names, read and not imported; each paragraph once, since
documentation repeats itself. What is held out is whole files, so that no text of theirs is among what is learnt.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import importlib.util
import multiprocessing
import re
import sysconfig
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

STANDARD_LIBRARY = "python"
#: those that are not installed are left out
PACKAGES = (
    *(STANDARD_LIBRARY, "torch", "numpy", "scipy", "sympy", "sklearn", "networkx", "matplotlib", "transformers"),
    *("pandas", "statsmodels", "jax", "xarray", "skimage", "torch_geometric", "torchvision"),
)
_LEFT_OUT = frozenset({"test", "tests", "testing", "site-packages", "dist-packages", "__pycache__"})
#: one file in so many is held out
HELD_OUT = 24
#: characters below which a paragraph may come again: headings of sections
_HEADING = 48
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, kw_only=True)
class Text:
    """learnt, held_out: in UTF-8. packages: whose it is."""

    learnt: bytes
    held_out: bytes
    packages: tuple[str, ...]

    @functools.cached_property
    def digest(self) -> str:
        """Of both: equal if and only if the texts are."""
        return hashlib.sha256(self.learnt + b"\0" + self.held_out).hexdigest()[:16]


def read(packages: Sequence[str] = PACKAGES, *, processes: int = 1) -> Text:
    """The text of those packages that are installed."""
    roots = {name: root for name in packages if (root := _root(name)) is not None}
    files = [file for root in roots.values() for file in source_files(root)]
    if processes == 1:
        documents = list(map(documentation, files))
    else:
        with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            documents = list(pool.map(documentation, files, chunksize=32))
    seen: set[str] = set()
    parts: dict[bool, list[str]] = {True: [], False: []}
    for i, document in enumerate(documents):
        parts[i % HELD_OUT == HELD_OUT - 1].extend(_unseen(document, seen))
    return Text(learnt=_bytes(parts[False]), held_out=_bytes(parts[True]), packages=tuple(roots))


def save(text: Text, path: Path) -> None:
    """As a zip file."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        file.writestr("learnt", text.learnt)
        file.writestr("held_out", text.held_out)
        file.writestr("packages", " ".join(text.packages))


def load(path: Path) -> Text:
    """What `save` wrote."""
    with zipfile.ZipFile(path) as file:
        packages = file.read("packages").decode().split()
        return Text(learnt=file.read("learnt"), held_out=file.read("held_out"), packages=tuple(packages))


def source_files(root: Path) -> list[Path]:
    """A package's, without its tests."""
    inside = ((path.relative_to(root).parts, path) for path in root.rglob("*.py"))
    return [path for parts, path in sorted(inside) if _LEFT_OUT.isdisjoint(parts)]


def documentation(file: Path) -> list[str]:
    """What a source file says of its module, classes and functions, in its order; nothing if it can't be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return []
    nodes = [node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    found = (ast.get_docstring(node) for node in nodes)
    return [text for text in found if text]


def _unseen(document: Iterable[str], seen: set[str]) -> Iterator[str]:
    """Of each docstring the paragraphs that did not come before."""
    for text in document:
        kept = []
        for paragraph in re.split(r"\n\s*\n", text):
            if paragraph in seen:
                continue
            if len(paragraph) >= _HEADING:
                seen.add(paragraph)
            kept.append(paragraph)
        if any(len(paragraph) >= _HEADING for paragraph in kept):
            yield "\n\n".join(kept)


def _bytes(parts: Sequence[str]) -> bytes:
    return "\n\n\n".join(parts).encode(errors="ignore")


def _root(name: str) -> Path | None:
    if name == STANDARD_LIBRARY:
        return Path(sysconfig.get_path("stdlib"))
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Read and save; print how much it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--packages", nargs="*", default=PACKAGES)
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args(arguments)
    text = read(given.packages, processes=given.processes)
    save(text, given.output)
    print(f"{len(text.learnt)} bytes and {len(text.held_out)} held out, of {' '.join(text.packages)}: {text.digest}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
