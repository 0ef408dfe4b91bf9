"""What Gluon kernels for Hopper hand on as named tuples: tuples.py says how. Nothing here imports triton."""

from __future__ import annotations

from typing import Any, NamedTuple


class SharedTiles(NamedTuple):
    """In shared memory."""

    q: Any
    k: Any
    v: Any
    out: Any


class Barriers(NamedTuple):
    """When tiles have come, and when they may be written over."""

    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class Layouts(NamedTuple):
    """Of products in registers."""

    QK: Any
    OUT: Any


class GradLayouts(NamedTuple):
    """Of a backward's products in registers."""

    SCORES: Any  # (keys, queries)
    GRAD_K: Any
    GRAD_V: Any
    SUM: Any  # of what is added to dq
