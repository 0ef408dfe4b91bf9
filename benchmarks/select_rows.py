"""Make the rows of the choice of kernels from what bench_select.py measured.

    python -m benchmarks.select_rows

Reads benchmarks/results/select_h200.csv and writes attn_compiler/lowerings/priorities_sm90.csv, one row for each class of shapes: the
lowerings in the order of their times (geometric mean over the shapes of the class, relative to the fastest), first one that takes at
most 1.1 times the fastest on each of them, if there is one. In training the order is that of forward and backward together, and the
first is no slower than that in the backward alone either. What was not measured comes last. Lengths below 1024 are left to the rows
of priorities.py: starting our kernels takes as long as they do there. No row is made from the shapes of select_cases.HELD_OUT_SEQLENS:
they show how rows do on lengths that they were not made from.

Two more files say something of such shapes: peers_h200.csv, times of peers alone, for those that select_h200.csv has not; and
cudnn_h200.csv, where cuDNN by its own graphs ran beside other lowerings: it is placed by its time relative to theirs, and never first.

--replay prints how the choice that the rows make now stands to the other sides in the measured times.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attn_compiler.lowerings import LOWERINGS, priorities, shape_class
from attn_compiler.options import Options
from attn_compiler.passes import select
from attn_compiler.target import Target
from benchmarks import bench_select, select_cases, standing

HEAD_DIMS = ((1, 64), (65, 96), (97, 128), (129, 256))
SEQLENS: tuple[tuple[int, int | None], ...] = ((1024, 4095), (4096, None))
_LAST = ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "triton")
# What a lowering may cost on one shape of a class and still come first.
_MOST_REGRET = 1.1
# Times that differ by less are the same.
_NOISE = 1.02

#: microseconds by lowering
Times = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Key:
    """A class of shapes: a row of the file but for its order."""

    mask: shape_class.Mask
    head_dims: tuple[int, int]
    seqlens: tuple[int, int | None]
    training: bool


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was measured of one case, for one key. times: of all passes together. backward: of that alone, in training."""

    case: str
    grouped: bool
    times: Times
    date: str
    backward: Times | None = None

    def regret(self, name: str) -> float:
        """How many times the fastest's time the lowering takes, at worst."""
        passes = [self.times] if self.backward is None else [self.times, self.backward]
        return max(times[name] / min(times.values()) for times in passes)


def read(path: Path = bench_select.RESULTS) -> list[dict[str, str]]:
    """The rows of a file; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def with_peers(rows: Sequence[Mapping[str, str]], peers: Iterable[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """The rows, and those of the peers for cases that the rows do not have."""
    known = {row["case"] for row in rows}
    return [*rows, *(row for row in peers if row["case"] not in known)]


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A lowering's time over that of another one in the same run."""

    key: Key
    name: str
    other: str
    ratio: float


def beside(rows: Iterable[Mapping[str, str]], name: str = "cudnn") -> list[Beside]:
    """What a run of a few lowerings says of one of them. A row has both passes of one lowering on one shape."""
    names = {lowering.name for lowering in LOWERINGS}
    runs: dict[tuple[str, ...], dict[str, tuple[float, float]]] = defaultdict(dict)
    for row in rows:
        if row["lowering"] in names and row["forward_us_p50"] and row["backward_us_p50"]:
            shape = tuple(row[column] for column in ("batch", "heads_q", "heads_kv", "seqlen", "head_dim", "case"))
            runs[shape][row["lowering"]] = (float(row["forward_us_p50"]), float(row["backward_us_p50"]))
    found = []
    for (*_, seqlen, head_dim, case), took in runs.items():
        mask = _MASKS.get(case.split(" of ")[0])
        if name not in took or mask is None:
            continue
        for training in (False, True):
            key = _key_of(mask, int(head_dim), int(seqlen), training=training)
            mine, others = _total(took[name], training), {n: _total(t, training) for n, t in took.items() if n != name}
            if key is not None:
                found += [Beside(key=key, name=name, other=n, ratio=mine / t) for n, t in others.items()]
    return found


_MASKS: Mapping[str, shape_class.Mask] = {"full": "full", "causal": "causal", "causal, window": "window"}


def _total(passes: tuple[float, float], training: bool) -> float:
    return sum(passes) if training else passes[0]


def evidence(rows: Iterable[Mapping[str, str]]) -> dict[Key, list[Evidence]]:
    """The times of lowerings by class. A training step's are of the lowerings that have both."""
    names = {lowering.name for lowering in LOWERINGS}
    times: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    dates: dict[str, str] = {}
    for row in rows:
        if row["side"] in names and row["p50_us"]:
            times[row["case"], row["pass"]][row["side"]] = float(row["p50_us"])
            dates[row["case"]] = row["date"]
    found: dict[Key, list[Evidence]] = defaultdict(list)
    for case in select_cases.CASES:
        if case.name not in dates or case.seqlen in select_cases.HELD_OUT_SEQLENS:
            continue
        forward, backward = times[case.name, "forward"], times[case.name, "backward"]
        both = {name: forward[name] + backward[name] for name in forward if name in backward}
        for training, took in ((False, forward), (True, both)):
            key = _key(case, training=training)
            if key is not None and took:
                one = Evidence(
                    case=case.name,
                    grouped=case.heads_kv != case.heads_q,
                    times=took,
                    date=dates[case.name],
                    backward={name: backward[name] for name in took} if training else None,
                )
                found[key].append(one)
    return found


def _key(case: select_cases.Case, *, training: bool) -> Key | None:
    mask = shape_class.of(select_cases.spec_of(case, training=training)).mask
    return _key_of(mask, case.head_dim, case.seqlen, training=training)


def _key_of(mask: shape_class.Mask, head_dim: int, seqlen: int, *, training: bool) -> Key | None:
    seqlens = next((bounds for bounds in SEQLENS if _is_within(seqlen, bounds)), None)
    head_dims = next((first, last) for first, last in HEAD_DIMS if first <= head_dim <= last)
    return None if seqlens is None else Key(mask=mask, head_dims=head_dims, seqlens=seqlens, training=training)


def _is_within(size: int, bounds: tuple[int, int | None]) -> bool:
    return bounds[0] <= size and (bounds[1] is None or size <= bounds[1])


def ranked(measured: Sequence[Evidence]) -> list[tuple[str, float]]:
    """Lowerings that ran on every shape, in the order to ask them, with the geometric mean of their times over the fastest's."""
    common = set.intersection(*(set(one.times) for one in measured))
    means = {
        name: statistics.geometric_mean(one.times[name] / min(one.times.values()) for one in measured)
        for name in common
    }
    order = sorted(common, key=lambda name: (means[name], name))
    safe = [name for name in order if all(one.regret(name) <= _MOST_REGRET for one in measured)]
    first = safe[:1] or order[:1]
    return [(name, means[name]) for name in (*first, *(name for name in order if name not in first))]


def placed(order: list[tuple[str, float]], others: Sequence[Beside]) -> list[tuple[str, float]]:
    """The order with the lowerings that were only measured beside some of it, each after those that are as fast, and never first."""
    means = dict(order)
    for name in dict.fromkeys(one.name for one in others):
        ratios = [means[one.other] * one.ratio for one in others if one.name == name and one.other in means]
        if name in means or not ratios:
            continue
        mean = statistics.geometric_mean(ratios)
        at = next((i for i, (_, other) in enumerate(order) if i > 0 and other > mean * _NOISE), len(order))
        order = [*order[:at], (name, mean), *order[at:]]
    return order


def lines(found: Mapping[Key, Sequence[Evidence]], others: Sequence[Beside] = ()) -> list[dict[str, str]]:
    """The rows of the file. Fewer heads of k and v have a row of their own where another lowering comes first with them."""
    written = []
    for key in sorted(found, key=_place):
        measured = found[key]
        parts = [[one for one in measured if one.grouped == grouped] for grouped in (False, True)]
        if all(parts) and ranked(parts[0])[0][0] != ranked(parts[1])[0][0]:
            written += [_line(key, part, grouped, others) for part, grouped in zip(parts, ("no", "yes"), strict=True)]
        else:
            written.append(_line(key, measured, "", others))
    return written


def _place(key: Key) -> tuple[int, tuple[int, int], int, bool]:
    return shape_class.MASKS.index(key.mask), key.head_dims, key.seqlens[0], key.training


def _line(key: Key, measured: Sequence[Evidence], grouped: str, others: Sequence[Beside]) -> dict[str, str]:
    order = placed(ranked(measured), [one for one in others if one.key == key])
    names = [name for name, _ in order]
    said = ", ".join(f"{name} {mean:.2f}" for name, mean in order)
    return {
        "mask": key.mask,
        "head_dim_from": str(key.head_dims[0]),
        "head_dim_to": str(key.head_dims[1]),
        "seqlen_from": str(key.seqlens[0]),
        "seqlen_to": "" if key.seqlens[1] is None else str(key.seqlens[1]),
        "training": "yes" if key.training else "no",
        "grouped": grouped,
        "order": " ".join([*names, *(name for name in _LAST if name not in names)]),
        "since": max(one.date for one in measured),
        "why": f"times the fastest: {said} ({', '.join(one.case for one in measured)})",
    }


def all_lines(folder: Path = bench_select.RESULTS.parent) -> list[dict[str, str]]:
    """The rows that the CSVs of a folder give."""
    rows = with_peers(read(folder / bench_select.RESULTS.name), read(folder / "peers_h200.csv"))
    return lines(evidence(rows), beside(read(folder / "cudnn_h200.csv")))


def replayed(rows: Sequence[Mapping[str, str]]) -> list[standing.Shape]:
    """The measured shapes with the choice that is made for them now, on the machine that they were measured on."""
    found = []
    for shape in standing.of(rows):
        row = next(row for row in rows if (row["case"], row["pass"]) == (shape.case, shape.which))
        spec = select_cases.spec_of(select_cases.BY_NAME[shape.case], training=shape.which != "forward")
        chosen = select.decide(spec, _target(row), Options()).lowering
        if chosen in shape.times:
            found.append(dataclasses.replace(shape, chosen=chosen))
    return found


def _target(row: Mapping[str, str]) -> Target:
    """The H200 of a row."""
    versions = {name: row[name] for name in ("torch", "triton", *bench_select.PACKAGES)}
    return Target.fake(cudnn=int(row["cudnn"]), **versions)


def main() -> None:
    """Write the file, or print how its choices stand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=bench_select.RESULTS.parent, help="the folder of the CSVs")
    parser.add_argument("--output", type=Path, default=priorities.MEASURED)
    parser.add_argument("--replay", action="store_true")
    options = parser.parse_args()
    if options.replay:
        bench_select.print_shapes(replayed(read(options.results / bench_select.RESULTS.name)))
        return
    with options.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, priorities.COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(all_lines(options.results))


if __name__ == "__main__":
    main()
