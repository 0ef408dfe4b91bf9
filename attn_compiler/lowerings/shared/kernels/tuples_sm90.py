"""Named tuples that Gluon kernels for Hopper pass on, as tuples.py says. Nothing here imports triton."""

from __future__ import annotations

from typing import Any, NamedTuple


class SharedTiles(NamedTuple):
    """Tiles in shared memory."""

    q: Any
    k: Any
    v: Any
    out: Any


class Barriers(NamedTuple):
    """Barriers of tiles: they have been loaded, and they may be overwritten."""

    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class Layouts(NamedTuple):
    """Layouts of products in registers."""

    QK: Any
    OUT: Any


class GradLayouts(NamedTuple):
    """Layouts of a backward's products in registers."""

    SCORES: Any  # (keys, queries)
