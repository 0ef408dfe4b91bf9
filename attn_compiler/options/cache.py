"""The part of the compile-cache key that the graph does not show: what makes a compiled artifact ours, and current."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path

from attn_compiler.options.options import Options
from attn_compiler.spec.target import Target


def cache_key(options: Options, targets: Iterable[Target]) -> str:
    """Differs whenever one graph could become different code: version, our sources, options, machines and their flags.

    The targets bring in the SDPA kernels that the user switched off, which PyTorch's own key leaves out.
    """
    machines = ",".join(sorted(target.digest() for target in targets))
    return f"{package_version()}/{sources_digest()}/{options.digest()}/{machines}"


@functools.cache
def package_version() -> str:
    """The installed version of this package."""
    return importlib.metadata.version("attn_compiler")


@functools.cache
def sources_digest() -> str:
    """A hash of every file of the package (lowerings, kernels, priorities ...): an edit between two releases counts."""
    return digest_of_tree(Path(__file__).parents[1])


def digest_of_tree(root: Path) -> str:
    """A hash of the names and contents of all files under `root`, but for compiled Python."""
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()[:16]
