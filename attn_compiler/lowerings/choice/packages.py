"""Gain of a package that is not installed, by the times of sites like the one at hand. It decides nothing: the report shows it."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

from attn_compiler.lowerings.choice import priorities
from attn_compiler.lowerings.choice.rows import Row
from attn_compiler.reasons.decisions import Faster
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import CUDNN_FRONTEND_DISTRIBUTION, FLASH_ATTN_4_DISTRIBUTION, INSTALL, Target

#: smaller gains are within the difference between two machines
_LEAST = 1.03


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A package that one lowering needs.

    field: of Target, its version. version: one that serves.
    """

    lowering: str
    distribution: str
    install: str
    field: str
    version: str

    def installed(self, target: Target) -> Target:
        """Return the same machine with the package."""
        changed: dict[str, Any] = {self.field: self.version}
        return dataclasses.replace(target, **changed)


PACKAGES = (
    Package(
        lowering="fa4",
        distribution=FLASH_ATTN_4_DISTRIBUTION,
        install=INSTALL[FLASH_ATTN_4_DISTRIBUTION],
        field="flash_attn_4",
        version="4.0.0b36",
    ),
    Package(
        lowering="cudnn",
        distribution=CUDNN_FRONTEND_DISTRIBUTION,
        install=INSTALL[CUDNN_FRONTEND_DISTRIBUTION],
        field="cudnn_frontend",
        version="1.27.0",
    ),
)


def faster(spec: AttentionSpec, target: Target, chosen: str) -> list[tuple[Faster, Target]]:
    """Return the lowerings that were measured faster than the chosen one, the fastest first, each with the machine that has its package.

    The caller asks whether that lowering would take the site.
    """
    row = priorities.row_of(spec, target)
    if row is None or chosen not in row.times:
        return []
    found = [
        (_faster(package, row.times[chosen] / row.times[package.lowering], row), package.installed(target))
        for package in PACKAGES
        if package.lowering in row.times and row.times[chosen] >= _LEAST * row.times[package.lowering]
    ]
    return sorted(found, key=lambda one: -one[0].speed)


def _faster(package: Package, speed: float, row: Row) -> Faster:
    return Faster(
        lowering=package.lowering,
        distribution=package.distribution,
        install=package.install,
        speed=speed,
        why=row.why,
        since=row.since,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Rank of a package over all classes of sites that were timed.

    first: classes in which it would be the fastest. classes: all. speed: how much faster it is in those, as a ratio.
    """

    first: int
    classes: int
    speed: float


def standing(package: Package, sm: int) -> Standing | None:
    """Compare a package with the lowerings that need no package; None for an architecture without measured rows."""
    rows = [row for row in priorities.ROWS if row.times and row.sms is not None and row.sms[0] <= sm <= row.sms[1]]
    others = {one.lowering for one in PACKAGES}
    gains = [
        min(time for name, time in row.times.items() if name not in others) / row.times[package.lowering]
        for row in rows
        if package.lowering in row.times and row.times.keys() - others
    ]
    better = [gain for gain in gains if gain >= _LEAST]
    return Standing(first=len(better), classes=len(rows), speed=statistics.geometric_mean(better)) if better else None
