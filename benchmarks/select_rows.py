"""Make the rows of the choice of kernels from what bench_select.py measured.

    python -m benchmarks.select_rows

Reads benchmarks/results/select_h200.csv and writes attn_compiler/lowerings/choice/priorities_sm90.csv, one row for each class of shapes:
the lowerings in the order of their times (geometric mean over the shapes of the class, relative to the fastest), first one that takes at
most 1.1 times the fastest on each of them, if there is one, then the same of those that are left: each is what is best on a machine that
has none of those before. Of two that differ by less than 1%, one that wants no further package comes first. In training the order is that
of forward and backward together, and the first is no slower than that in the backward alone either. What was not measured comes last.

A row made from 512 tokens wants a q of at least a quarter of the size that was measured: starting a kernel takes longer than some run
there. No row is made from the shapes of select_cases.HELD_OUT_SEQLENS: they show how rows do on lengths that they were not made from.

A lowering that was measured later has the times of that run (LATER) times what `triton`, `sdpa_cudnn` and `fa4` took in the first one
over what they took in the later one, geometric mean. Where its backward is another family's, it has that one's time.

--replay prints how the choice that the rows make now stands to the other sides in the measured times: of the file that the rows are made
from, or of another run (--times).
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attn_compiler.lowerings import LOWERINGS
from attn_compiler.lowerings.choice import priorities, shape_class
from attn_compiler.lowerings.hopper.call import backward_of
from attn_compiler.options.options import Options
from attn_compiler.passes.writing import select
from attn_compiler.spec.target import Target
from benchmarks import bench_select, harness, select_cases
from benchmarks.harness import arg, command

HEAD_DIMS = ((1, 64), (65, 96), (97, 128), (129, 256))
#: where the lengths begin that a measured one stands for: the next one's begin ends them, if that was measured of the same sort
FIRST_SEQLEN: Mapping[int, int] = {512: 512, 2048: 1536, 8192: 4096, 32768: 16384}
# Where 512 was not measured, 2048 stands for these too; what is shorter has no rows.
_LEAST_SEQLEN = 1024
# Rows for 512 want so many elements of q, a quarter of what was measured.
_LEAST_ELEMENTS = 1 << 23
# What a lowering may cost on one shape of a class and still come first.
_MOST_REGRET = 1.1
# Means that differ by less are the same; then what every machine has comes first.
_NOISE = 1.01
_EVERYWHERE = ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "hopper", "triton")
LATER = bench_select.RESULTS.with_name("select_hopper_h200.csv")
_LATER = "hopper"
#: what ties both runs together
_BESIDE = ("triton", "sdpa_cudnn", "fa4")
# What machines may lack: a part of a class has a row of its own where another choice is made there with or without these.
_LACKING: tuple[frozenset[str], ...] = (frozenset(), frozenset({"fa4"}), frozenset({"fa4", "cudnn"}))

#: microseconds by lowering
Times = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Key:
    """A class of shapes: a row of the file but for its order. seqlen: the measured one."""

    mask: shape_class.Mask
    head_dims: tuple[int, int]
    seqlen: int
    training: bool


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was measured of one case, for one key. times: of all passes together. backward: of that alone, in training."""

    case: str
    band: shape_class.Band
    grouped: bool
    times: Times
    date: str
    backward: Times | None = None

    def regret(self, name: str, among: Iterable[str]) -> float:
        """How many times the fastest's time the lowering takes, at worst."""
        names = set(among)
        passes = [self.times] if self.backward is None else [self.times, self.backward]
        return max(times[name] / min(times[other] for other in names) for times in passes)


def read(path: Path = bench_select.RESULTS) -> list[dict[str, str]]:
    """The rows of a file; none if there is no such file."""
    return harness.read(path, missing_ok=True)


def evidence(rows: Iterable[Mapping[str, str]]) -> dict[Key, list[Evidence]]:
    """The times of lowerings by class. A training step's are of the lowerings that have both."""
    names = {lowering.name for lowering in LOWERINGS}
    times: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    dates: dict[str, str] = {}
    for row in rows:
        if row["side"] in names and row["p50_us"]:
            times[row["case"], row["pass"]][row["side"]] = _time(row)
            dates[row["case"]] = max(row["date"], dates.get(row["case"], ""))
    found: dict[Key, list[Evidence]] = defaultdict(list)
    for case in select_cases.CASES:
        if case.name not in dates or case.seqlen in select_cases.HELD_OUT_SEQLENS:
            continue
        forward, backward = times[case.name, "forward"], times[case.name, "backward"]
        both = {name: forward[name] + backward[name] for name in forward if name in backward}
        for training, took in ((False, forward), (True, both)):
            if took:
                one = Evidence(
                    case=case.name,
                    band=shape_class.classify(select_cases.spec_of(case, training=training)).band,
                    grouped=case.heads_kv != case.heads_q,
                    times=took,
                    date=dates[case.name],
                    backward={name: backward[name] for name in took} if training else None,
                )
                found[_key(case, training=training)].append(one)
    return found


def joined(rows: Sequence[Mapping[str, str]], later: Iterable[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """With what `LATER` says, as if it had been measured with the rest."""
    found = {(row["case"], row["pass"], row["side"]): row for row in rows if row["p50_us"]}
    apart = {(row["case"], row["pass"], row["side"]): row for row in later if row["p50_us"]}
    added: list[Mapping[str, str]] = []
    for case in dict.fromkeys(case for case, of_pass, side in apart if (of_pass, side) == ("forward", _LATER)):
        forward = _as_if_with(found, apart, (case, "forward"))
        if forward is None:
            continue
        added.append(forward)
        family = backward_of(select_cases.spec_of(select_cases.BY_NAME[case], training=True), Target.fake())
        is_own = family == _LATER
        which = (case, "backward")
        backward = _as_if_with(found, apart, which) if is_own else found.get((*which, family))
        if backward is not None:
            added.append({**backward, "side": _LATER})
    return [*rows, *added]


def _as_if_with(
    found: Mapping[tuple[str, str, str], Mapping[str, str]],
    apart: Mapping[tuple[str, str, str], Mapping[str, str]],
    which: tuple[str, str],
) -> Mapping[str, str] | None:
    """A row of `LATER` in the times of the first run; None where nothing was measured in both. which: case and pass."""
    row = apart.get((*which, _LATER))
    both = [
        (found[*which, side], apart[*which, side])
        for side in _BESIDE
        if (*which, side) in found and (*which, side) in apart
    ]
    # What was far behind was timed twice only.
    both = [(then, now) for then, now in both if "2" not in (then["rounds"], now["rounds"])]
    if row is None or not both:
        return None
    return _scaled(row, statistics.geometric_mean(_time(then) / _time(now) for then, now in both))


def _scaled(row: Mapping[str, str], by: float) -> dict[str, str]:
    changed = {name: f"{float(row[name]) * by:.1f}" for name in ("p20_us", "p50_us", "p80_us")}
    return {**row, **changed, "tflops": f"{float(row['tflops']) / by:.1f}"}


def _time(row: Mapping[str, str]) -> float:
    """The median; of the two rounds of a side that was far behind, nearly the faster one: the other may hold a start."""
    return float(row["p20_us"] if row["rounds"] == "2" else row["p50_us"])


def _key(case: select_cases.Case, *, training: bool) -> Key:
    mask = shape_class.classify(select_cases.spec_of(case, training=training)).mask
    head_dims = next((first, last) for first, last in HEAD_DIMS if first <= case.head_dim <= last)
    return Key(mask=mask, head_dims=head_dims, seqlen=case.seqlen, training=training)


def ranked(measured: Sequence[Evidence]) -> list[tuple[str, float]]:
    """Lowerings that ran on every shape, in the order to ask them, with the geometric mean of their times over the fastest's."""
    left = set.intersection(*(set(one.times) for one in measured))
    means = {
        name: statistics.geometric_mean(one.times[name] / min(one.times.values()) for one in measured) for name in left
    }
    order = []
    while left:
        safe = {name for name in left if all(one.regret(name, left) <= _MOST_REGRET for one in measured)} or left
        least = min(means[name] for name in safe)
        same = [name for name in safe if means[name] <= _NOISE * least]
        order.append(min(same, key=lambda name: (name not in _EVERYWHERE, means[name], name)))
        left.remove(order[-1])
    return [(name, means[name]) for name in order]


def choices(measured: Sequence[Evidence]) -> list[str]:
    """The first of the order on machines that lack more and more."""
    order = [name for name, _ in ranked(measured)]
    return [name for lacking in _LACKING for name in [n for n in order if n not in lacking][:1]]


def lines(found: Mapping[Key, Sequence[Evidence]]) -> list[dict[str, str]]:
    """The rows of the file. A band has a row of its own before that of its class where another lowering comes first with it."""
    written = []
    for key in sorted(found, key=_place):
        measured, bounds = found[key], _bounds(key, found)
        for band in shape_class.BANDS:
            part = [one for one in measured if one.band == band]
            if part and choices(part) != choices(measured):
                written += _by_heads(key, part, bounds, band)
        written += _by_heads(key, measured, bounds, "")
    return written


def _by_heads(
    key: Key, measured: Sequence[Evidence], bounds: tuple[int, int | None], band: str
) -> list[dict[str, str]]:
    """Fewer heads of k and v have a row of their own where another lowering comes first with them."""
    parts = [[one for one in measured if one.grouped == grouped] for grouped in (False, True)]
    if all(parts) and choices(parts[0]) != choices(parts[1]):
        return [_line(key, part, bounds, band, grouped) for part, grouped in zip(parts, ("no", "yes"), strict=True)]
    return [_line(key, measured, bounds, band, "")]


def _place(key: Key) -> tuple[int, tuple[int, int], int, bool]:
    return shape_class.MASKS.index(key.mask), key.head_dims, key.seqlen, key.training


def _bounds(key: Key, found: Iterable[Key]) -> tuple[int, int | None]:
    """The first and the last length of its class; None: there is no end, since no longer one was measured of the same sort."""
    alike = [other.seqlen for other in found if dataclasses.replace(other, seqlen=key.seqlen) == key]
    first = FIRST_SEQLEN[key.seqlen]
    if key.seqlen == 2048 and 512 not in alike:
        first = _LEAST_SEQLEN
    longer = [FIRST_SEQLEN[seqlen] for seqlen in alike if seqlen > key.seqlen]
    if not longer and first < _LEAST_SEQLEN:
        return first, _LEAST_SEQLEN - 1
    return first, min(longer) - 1 if longer else None


def _line(
    key: Key, measured: Sequence[Evidence], bounds: tuple[int, int | None], band: str, grouped: str
) -> dict[str, str]:
    order = ranked(measured)
    names = [name for name, _ in order]
    said = ", ".join(f"{name} {mean:.2f}" for name, mean in order)
    first, last = bounds
    return {
        "mask": key.mask, "band": band, "head_dim_from": str(key.head_dims[0]), "head_dim_to": str(key.head_dims[1]),
        "seqlen_from": str(first), "seqlen_to": "" if last is None else str(last),
        "elements_from": str(_LEAST_ELEMENTS) if first < _LEAST_SEQLEN else "",
        "training": "yes" if key.training else "no", "grouped": grouped,
        "order": " ".join([*names, *(name for name in _EVERYWHERE if name not in names)]),
        "since": max(one.date for one in measured), "times": said, "cases": ", ".join(one.case for one in measured),
    }  # fmt: skip


def all_lines(path: Path = bench_select.RESULTS) -> list[dict[str, str]]:
    """The rows that a CSV gives."""
    return lines(evidence(joined(read(path), read(LATER))))


def replayed(rows: Sequence[Mapping[str, str]]) -> list[bench_select.Shape]:
    """The measured shapes with the choice that is made for them now, on the machine that they were measured on; with what `LATER` says."""
    rows = joined(rows, read(LATER))
    found = []
    for shape in bench_select.shapes_of(rows):
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


@command(
    __doc__,
    arg("--times", type=Path, default=bench_select.RESULTS, help="what was measured (%(default)s)"),
    arg("--output", type=Path, default=priorities.MEASURED),
    arg("--replay", action="store_true", help="print how the committed rows stand in these times"),
)
def main(given: Namespace) -> None:
    """Write the file, or print how its choices stand."""
    if given.replay:
        bench_select.print_shapes(replayed(read(given.times)))
        return
    harness.write(given.output, priorities.COLUMNS, all_lines(given.times))


if __name__ == "__main__":
    sys.exit(main())
