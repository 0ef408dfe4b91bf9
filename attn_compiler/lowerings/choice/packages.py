"""What a package that is not installed would gain for a site, by the times of sites like it. It decides nothing: the report says it."""

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

#: less is within what two machines differ by
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
        """The same machine with the package."""
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
    """What was measured to be faster than the chosen lowering, the fastest first, and the machine with its package.

    Whether that lowering would take the site is for the caller to ask it.
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
    """A package over all classes of sites that were timed: in how many it would be the fastest, of how many, and how much faster then."""

    first: int
    classes: int
    speed: float


def standing(package: Package, sm: int) -> Standing | None:
    """Beside what needs no package at all; None for an architecture without measured rows."""
    rows = [row for row in priorities.ROWS if row.times and row.sms is not None and row.sms[0] <= sm <= row.sms[1]]
    others = {one.lowering for one in PACKAGES}
    gains = [
        min(time for name, time in row.times.items() if name not in others) / row.times[package.lowering]
        for row in rows
        if package.lowering in row.times and row.times.keys() - others
    ]
    better = [gain for gain in gains if gain >= _LEAST]
    return Standing(first=len(better), classes=len(rows), speed=statistics.geometric_mean(better)) if better else None
