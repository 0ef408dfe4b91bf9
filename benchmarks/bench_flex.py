"""On a GPU, models that call FlexAttention: our backend beside Inductor, which compiles the same calls with Flex's own kernels.

    python -m benchmarks.bench_flex --jobs 6 --budget-seconds 540
    python -m benchmarks.bench_flex --cases 'llama/train/*' --append
    python -m benchmarks.bench_flex --tiny --output /tmp/flex.csv

A row is a model, a call and a length (benchmarks/flex_cases.py), 16,384 tokens a forward and half of them a training step, in bfloat16.
Each has a process of its own, and each side there its own empty caches for the first step, whose seconds hold whatever is compiled. Then
both are timed in turn. `attentions` is how many the model has, `sites` how many were found; `difference` is ours to the same model with
plain attention, uncompiled. --jobs so many cases are compiled at a time, which costs first steps some time, the same on both sides, and
timed one after another. Models of transformers are compiled for us by compile_model (docs/launchers.md), with --as-is by torch.compile,
as for Inductor. --tiny: a dry run on a CPU, where no side has Inductor, which has no backward of Flex there.
Writes benchmarks/results/flex_h200.csv. Exits with 1 where an attention was not found, or something is slower, wrong or failed.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import attn_compiler
from benchmarks import bench_h200, compare, flex_cases, found, harness, waves
from benchmarks.compare import Case
from benchmarks.flex_cases import CALLS, MODELS, FlexCase
from benchmarks.harness import BACKEND, BASELINE, Step
from benchmarks.models import Size

RESULTS = Path(__file__).parent / "results" / "flex_h200.csv"
KEYS = ("model", "call", "length", "batch", "jobs")
LENGTHS = (2048, 8192)
TINY_LENGTH = 160
#: of one attention that writes them, to be compared with: in float32 and several times over, with what the backward needs
MOST_SCORES = 1 << 31
#: transformers refuses sinks of FlexAttention on a CPU
TINY_MODELS = tuple(name for name in MODELS if name != "gpt_oss")
FIRST = tuple(f"{side}_first_seconds" for side in (BASELINE, BACKEND))
_TIMES = tuple(f"{side}_{p}_ms" for side in (BASELINE, BACKEND) for p in ("p20", "p50", "p80"))
COLUMNS = (
    *KEYS,
    "attentions",
    *found.COLUMNS,
    "rounds",
    *_TIMES,
    "ratio",
    *FIRST,
    "difference",
    f"{BASELINE}_difference",
    "error",
    "error_eager",
    "numerics",
    *bench_h200.KERNELS,
    "failure",
)
IMPORTS = (*bench_h200.IMPORTS, "benchmarks.flex_cases")


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How cases are measured. dry: on a CPU, small, without Inductor. as_is: models of transformers by torch.compile alone."""

    device: str
    seconds: float
    dry: bool = False
    as_is: bool = False


class SideFailed(Exception):
    """The first step of a side failed; its name, and the first line of what it said."""


def prepare(what: tuple[FlexCase, Way], lock: AbstractContextManager[Any]) -> waves.Finish:
    """Compile and check a case; its row follows by timing it. lock: held while its results are computed in float32."""
    named, way = what
    row: dict[str, str] = {}
    try:
        with _of_dry_runs(way), tempfile.TemporaryDirectory() as folder:
            size: Size = "small" if way.dry else "full"
            case, layers = named.case(size, way.device)
            row["attentions"] = str(layers)
            try:
                steps, seconds = first_steps(case, way, folder)
            except torch.OutOfMemoryError:
                # What other processes compute in float32 is large, and one of them does it at a time.
                bench_h200.forget(case, way.device)
                with lock:
                    steps, seconds = first_steps(case, way, folder)
            row |= {f"{side}_first_seconds": f"{took:.2f}" for side, took in seconds.items()}
            row |= found.columns(attn_compiler.reports())
            print(named.words, *(row[name] for name in FIRST), "s", file=sys.stderr, flush=True)
            if named.scores(size) > MOST_SCORES:
                row["numerics"] = compare.NO_MEMORY
            else:
                with lock:
                    row |= numbers(case, steps)
            bench_h200.forget(case, way.device)
    except Exception as error:  # noqa: BLE001 (one broken case must not cost the others, and the row names it)
        failed = row | {"failure": bench_h200.failure(error)}
        return lambda: failed
    return functools.partial(_finish, case, steps, row, way)


def _finish(case: Case, steps: Mapping[str, Step], row: dict[str, str], way: Way) -> dict[str, str]:
    try:
        with _of_dry_runs(way):
            row |= harness.timing_columns(harness.interleave(steps, way.device, seconds=way.seconds))
            row |= {} if way.dry else bench_h200.kernel_columns(steps, row["lowerings"])
    except Exception as error:  # noqa: BLE001 (as above)
        row |= {"failure": bench_h200.failure(error)}
    bench_h200.forget(case, way.device)
    return row


def first_steps(case: Case, way: Way, folder: str) -> tuple[dict[str, Step], dict[str, float]]:
    """A step of each side, compiled by its first call, and the seconds of that. folder: of what either keeps on disk.

    Raises SideFailed.
    """
    steps: dict[str, Step] = {}
    seconds: dict[str, float] = {}
    inner = "aot_eager" if way.dry else BASELINE
    sides: dict[str, tuple[str, dict[str, Any] | None]] = {
        BASELINE: (inner, None),
        BACKEND: (BACKEND, {"inner": inner} if way.dry else None),
    }
    compare.warm_up(way.device, dict(sides.values()))
    for side, (backend, options) in sides.items():
        module = case.model if side == BACKEND else case.baseline or case.model
        model = flex_cases.compile_parts(module, backend, options, as_is=way.as_is)
        steps[side] = harness.make_step(model, case.inputs, training=case.training)
        with own_caches(folder):
            begin = time.perf_counter()
            try:
                steps[side]()
                if way.device != "cpu":
                    torch.cuda.synchronize()
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                raise SideFailed(f"{side}: {bench_h200.failure(error)}") from error
            seconds[side] = time.perf_counter() - begin
        bench_h200.forget(case, way.device)
    return steps, seconds


@contextlib.contextmanager
def own_caches(folder: str) -> Iterator[None]:
    """Inside, nothing that was compiled before is known: not on disk, and not to Inductor in this process."""
    from torch._inductor.utils import fresh_cache

    # Code that was loaded may read its files later.
    with fresh_cache(dir=folder, delete=False):
        yield


@contextlib.contextmanager
def _of_dry_runs(way: Way) -> Iterator[None]:
    """On a CPU FlexAttention refuses tensors that need gradients, for Inductor's sake."""
    if not way.dry:
        yield
        return
    from torch.nn.attention import flex_attention

    with mock.patch.object(flex_attention, "_validate_device", _pass):
        yield


def _pass(*_: Any) -> None:
    """Every tensor will do."""


def numbers(case: Case, steps: Mapping[str, Step]) -> dict[str, str]:
    """How far both sides are from the plain model uncompiled, and FlashAttention's rule against float32, if there is memory for those."""
    columns = {}
    try:
        assert case.plain is not None
        eager = compare.results(case, case.plain, harness.make_step(case.plain, case.inputs, training=case.training))
        sides = ((BACKEND, "difference", case.model), (BASELINE, f"{BASELINE}_difference", case.baseline or case.model))
        for side, name, module in sides:
            difference = compare.relative_error(compare.results(case, module, steps[side]), eager)
            columns[name] = f"{difference:.3g}"
        del eager
    except torch.OutOfMemoryError:
        bench_h200.forget(case, case.device)
    return columns | compare.checked(case, steps[BACKEND])


def measured(
    cases: Sequence[FlexCase], way: Way, *, jobs: int, until: float, wave_seconds: float
) -> Iterator[tuple[FlexCase, dict[str, str]]]:
    """Cases with their rows, as they come. Each has a process of its own, as it is the first step there that is measured."""
    for start in range(0, len(cases), jobs):
        if time.monotonic() > until:
            return
        wave = [(case, way) for case in cases[start : start + jobs]]
        rows = waves.run(wave, prepare, jobs=jobs, until=until, wave_seconds=wave_seconds, imports=IMPORTS)
        yield from ((case, row or {}) for (case, _), row in rows)


def all_cases(models: Sequence[str], calls: Sequence[str], lengths: Sequence[int]) -> list[FlexCase]:
    """The shortest first."""
    return [
        FlexCase(model=model, call=call, length=length)
        for length in sorted(lengths)
        for call in CALLS
        if call in calls
        for model in models
    ]


def said(case: FlexCase, row: Mapping[str, str]) -> str:
    """A row, for people."""
    sites = f"{row.get('sites', '?')}/{row.get('attentions', '?')} sites, {row.get('proved', '?')} proved"
    words = f"{case.words}: {sites}, {row.get('lowerings') or 'no lowering'}"
    if "ratio" in row:
        words += f"; Inductor {row[f'{BASELINE}_p50_ms']} ms, ours {row[f'{BACKEND}_p50_ms']}, ratio {row['ratio']}"
    if FIRST[0] in row:
        words += f"; first step {row[FIRST[0]]} s, ours {row[FIRST[1]]}"
    words += f"; {row.get('difference', '?')} from eager, Inductor {row.get(f'{BASELINE}_difference', '?')}"
    words += f", {row.get('numerics', 'not checked')}"
    return words + "".join(f"\n    {name}: {row[name]}" for name in ("why", "failure") if row.get(name))


def is_short(row: Mapping[str, str]) -> bool:
    """Whether something is not as it should be: an attention not found, slower beyond noise, wrong, another kernel than the one named."""
    return (
        bool(row.get("failure"))
        or row.get("sites") != row.get("attentions")
        or row.get("numerics") == "WRONG"
        or row.get("pinned") == "NO"
        or float(row.get("ratio", "0")) < harness.MIN_RATIO
    )


def mean(rows: Sequence[Mapping[str, str]]) -> str:
    ratios = [float(row["ratio"]) for row in rows if row.get("ratio")]
    if not ratios:
        return "nothing was measured"
    return f"{len(ratios)} rows: geometric mean {statistics.geometric_mean(ratios):.3f}, smallest {min(ratios):.3f}"


def main() -> int:
    """Measure, print and write; 0 where every row is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="all; --tiny leaves out gpt_oss")
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS))
    parser.add_argument("--lengths", nargs="+", type=int, help=f"{LENGTHS}; --tiny: {TINY_LENGTH}")
    parser.add_argument("--cases", nargs="+", default=["*"], metavar="PATTERN", help="of llama/train/2048")
    parser.add_argument("--seconds", type=float, default=2.0, help="timing of one case (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="so many cases are compiled at a time (%(default)s)")
    parser.add_argument("--wave-seconds", type=float, default=200.0, help="how long these may take (%(default)s)")
    parser.add_argument("--budget-seconds", type=float, default=540.0, help="begin nothing after (%(default)s)")
    parser.add_argument("--append", action="store_true", help="keep the rows of the file and measure only the others")
    parser.add_argument("--tiny", action="store_true", help="a dry run on a CPU")
    parser.add_argument(
        "--as-is", action="store_true", help="models of transformers by torch.compile, not compile_model"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="the commit to name in the rows, where this is no checkout")
    options = parser.parse_args()

    until = time.monotonic() + options.budget_seconds
    device = "cpu" if options.tiny else options.device
    way = Way(device=device, seconds=options.seconds, dry=options.tiny, as_is=options.as_is)
    names = options.models or (TINY_MODELS if options.tiny else MODELS)
    cases = all_cases(names, options.calls, options.lengths or ([TINY_LENGTH] if options.tiny else LENGTHS))
    where = harness.environment(way.device, options.commit)
    file = harness.CsvFile(options.output, [*COLUMNS, *where], append=options.append)
    done = {tuple(row[key] for key in KEYS[:3]) for row in file.rows}
    wanted = [
        case
        for case in cases
        if (case.model, case.call, str(case.length)) not in done
        and any(fnmatch.fnmatch(case.words, pattern) for pattern in options.cases)
    ]
    left = len(wanted)
    for case, row in measured(wanted, way, jobs=options.jobs, until=until, wave_seconds=options.wave_seconds):
        left -= 1
        batch = case.batch("small" if way.dry else "full")
        name = dict(zip(KEYS, (case.model, case.call, case.length, batch, options.jobs), strict=True))
        file.add({**{key: str(value) for key, value in name.items()}, **row, **where})
        print(said(case, row), flush=True)
    print(mean(file.rows))
    if left:
        print(f"{left} cases left for a run with --append")
    return int(any(map(is_short, file.rows)))


if __name__ == "__main__":
    sys.exit(main())
