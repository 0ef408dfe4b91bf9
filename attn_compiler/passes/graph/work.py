"""What there is of a rewriting while it goes on: its units, how long each part took, and where an exception came from."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attn_compiler.passes.graph import faults
from attn_compiler.passes.graph.unit import Unit
from attn_compiler.reasons.errors import AttnCompilerError
from attn_compiler.reporting.dump import Dumper
from attn_compiler.torch_private import compat as torch_compat
from attn_compiler.torch_private.meanings import Known
from attn_compiler.torch_private.snapshots import Snapshot

if TYPE_CHECKING:
    from attn_compiler.passes.spelling.checkpoints import Inlined


@dataclass(kw_only=True)
class Work:
    """What is there of a rewriting when something fails. inlined: bodies of checkpoints that stand in the graph for now. known: as
    `Rewritten` has it. read: the places of inputs that may be known, and that the graph does not write to."""

    seconds: dict[str, float] = field(default_factory=dict)
    units: list[Unit] = field(default_factory=list)
    snapshot: Snapshot | None = None
    inlined: list[Inlined] = field(default_factory=list)
    known: tuple[tuple[int, Known], ...] = ()
    read: tuple[int, ...] = ()
    dumper: Dumper = field(default_factory=lambda: Dumper(directory=None, traced=False))


@contextlib.contextmanager
def timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] += time.perf_counter() - start


@contextlib.contextmanager
def located(name: str, unit: Unit | None) -> Iterator[None]:
    """Say which pass and which module an exception came from."""
    try:
        yield
    except AttnCompilerError:
        raise
    except Exception as error:
        if torch_compat.starts_over(error):
            raise
        raise faults.failed(name, (unit and (unit.current or unit.name)) or "the graph", error) from error
