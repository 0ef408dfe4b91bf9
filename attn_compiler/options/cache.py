"""The part of the compile-cache key that the graph does not show: versions, sources, options and machines."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from attn_compiler.options.options import Options
from attn_compiler.spec.target import Target


def cache_key(options: Options, targets: Iterable[Target]) -> str:
    """Return a key that differs whenever one graph could become different code: by version, our sources, options, machines and flags. The
    targets include the SDPA kernels that the user switched off, which PyTorch's own key leaves out."""
    machines = ",".join(sorted(target.digest() for target in targets))
    return f"{package_version()}/{sources_digest()}/{options.digest()}/{machines}"


@functools.cache
def package_version() -> str:
    """Return the installed version of this package."""
    return importlib.metadata.version("attn_compiler")


@functools.cache
def sources_digest() -> str:
    """Hash every file of the package (lowerings, kernels, priorities ...): an edit between two releases counts."""
    return digest_of_tree(Path(__file__).parents[1])


def digest_of_tree(root: Path) -> str:
    """Hash the names and contents of all files under `root`, but for compiled Python."""
    digest = hashlib.sha256()
    for name, path in sorted(_files(root, "")):
        with open(path, "rb", buffering=0) as file:
            content = file.read()
        digest.update(f"{name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def _files(folder: str | Path, name: str) -> Iterator[tuple[str, str]]:
    """Yield (name below the root, path) of each file. pathlib takes twice as long, and every process waits for this."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir():
                yield f"{name}{entry.name}", entry.path
            elif entry.name != "__pycache__":
                yield from _files(entry.path, f"{name}{entry.name}/")
