"""For a table of docs/supported.md: which of our Triton kernels were tried with which torch and Triton, of rows of benchmarks and tests.

Compiled and interpreted: benchmarks/results/triton_releases.csv and triton_interpreted.csv. On a GPU: every row of benchmarks/results that
names a device.
"""

from __future__ import annotations

import collections
import csv
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from attn_compiler.lowerings.shared.limits.triton_releases import COMPILED, Release

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
#: what a benchmark of one lowering calls it: (file, what it calls it)
_CALLED: Mapping[tuple[str, str], str] = {
    ("decode_h200.csv", "rule"): "decode",
    ("mla_h200.csv", "rule"): "decode_latent",
    ("mla_heads_h200.csv", "triton"): "decode_latent",
    ("mla_heads_h200.csv", "rule"): "decode_latent_sm90",
}
#: columns that say whose kernels ran
_SIDES = ("side", "lowering", "lowerings")
#: kernels that Triton's interpreter does not know the instructions of
_NOT_INTERPRETED = ("hopper", "hopper_fp8", "decode_latent_sm90")

_T = TypeVar("_T")


def _release(version: str) -> Release:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def on_gpus() -> dict[tuple[Release, Release, str], set[str]]:
    """By the releases of torch and Triton and the lowering, the cards that ran its kernels."""
    rows = [
        (path.name, row)
        for path in sorted(RESULTS.glob("*.csv"))
        for row in _rows(path.name)
        if row.get("device", "").startswith("NVIDIA ") and row.get("torch") and not row.get("failure")
    ]
    # Not every benchmark writes Triton's version: rows without it are of the one that most rows of that torch name.
    named = collections.Counter(
        (_release(row["torch"]), _release(row["triton"])) for _, row in rows if row.get("triton")
    )
    brought = dict(pair for pair, _ in reversed(named.most_common()))
    found: dict[tuple[Release, Release, str], set[str]] = collections.defaultdict(set)
    for file, row in rows:
        torch = _release(row["torch"])
        triton = _release(row["triton"]) if row.get("triton") else brought[torch]
        for lowering in _lowerings_of(file, row):
            found[torch, triton, lowering].add(row["device"].split()[1])
    return found


def _lowerings_of(file: str, row: Mapping[str, str]) -> Iterator[str]:
    for column in _SIDES:
        for word in re.findall(r"[a-z]\w*", row.get(column) or ""):
            called = _CALLED.get((file, word), word)
            if called in COMPILED:
                yield called


def table_rows() -> list[list[str]]:
    """Of each torch and the Triton that it was tried with, a row for each lowering that was."""
    compiled = collections.Counter(
        (row["torch"], row["triton"], row["lowering"]) for row in _rows("triton_releases.csv")
    )
    interpreted = {
        (row["torch"], row["triton"], row["lowering"]): (row["passed"], row["failed"])
        for row in _rows("triton_interpreted.csv")
    }
    cards = on_gpus()
    pairs = {(_release(torch), _release(triton)) for torch, triton, _ in (*compiled, *interpreted)}
    pairs |= {(torch, triton) for torch, triton, _ in cards}
    found = []
    for torch, triton in sorted(pairs):
        for lowering in COMPILED:
            kernels = _of(compiled, torch, triton, lowering)
            tested = _of(interpreted, torch, triton, lowering)
            ran = cards.get((torch, triton, lowering))
            if not (kernels or tested or ran):
                continue
            found.append(
                [
                    ".".join(map(str, torch)),
                    ".".join(map(str, triton)),
                    f"`{lowering}`",
                    f"{kernels}" if kernels else "–",
                    _said(lowering, tested),
                    ", ".join(sorted(ran or ())) or "–",
                ]
            )
    return found


def by_release() -> list[list[str]]:
    """Of each torch and Triton one row: which lowerings' kernels ran on which cards, were compiled, and are right in the interpreter."""
    rows = table_rows()
    found = []
    for torch, triton in dict.fromkeys((row[0], row[1]) for row in rows):
        mine = [row[2:] for row in rows if (row[0], row[1]) == (torch, triton)]
        cards: dict[str, list[str]] = collections.defaultdict(list)
        for lowering, _, _, ran in mine:
            cards[ran].append(lowering)
        cards.pop("–", None)
        tested = [f"{lowering}: {said}" for lowering, _, said, _ in mine if "tests" in said]
        compiled = [f"{lowering} {count}" for lowering, count, _, _ in mine if count != "–"]
        found.append(
            [
                torch,
                triton,
                "; ".join(f"{name}: {', '.join(lowerings)}" for name, lowerings in sorted(cards.items())) or "–",
                ", ".join(compiled) or "–",
                ", ".join(tested) or "–",
            ]
        )
    return found


def _of(given: Mapping[tuple[str, str, str], _T], torch: Release, triton: Release, lowering: str) -> _T | None:
    """The entry whose versions are of these releases."""
    return next(
        (x for (a, b, c), x in given.items() if (_release(a), _release(b), c) == (torch, triton, lowering)), None
    )


def _said(lowering: str, tested: tuple[str, str] | None) -> str:
    if lowering in _NOT_INTERPRETED:
        return "has no interpreter"
    if tested is None:
        return "–"
    passed, failed = tested
    return f"{passed} tests" if failed == "0" else f"{failed} of {int(passed) + int(failed)} tests failed"
