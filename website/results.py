"""Tables of docs/benchmarks.md: what was measured, a CSV a table."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from website.gains import CALLS, MODELS, RESULTS, Row, has_gain, rows_of


@dataclass(frozen=True, kw_only=True)
class Group:
    """A line of the first table. of: the ratios of a CSV's rows, one a case. file: the CSV."""

    words: str
    where: str
    file: str
    of: Callable[[str], Sequence[float]]

    def line(self) -> str | None:
        """None where nobody measured it."""
        found = self.of(self.file) if (RESULTS / f"{self.file}.csv").is_file() else []
        if not found:
            return None
        mean = statistics.geometric_mean(found)
        link = f"[{len(found)}](../benchmarks/results/{self.file}.csv)"
        return f"| {self.words} | {self.where} | {link} | {mean:.2f}x | {min(found):.2f}x |"


def _ratios(file: str, **wanted: str) -> list[float]:
    rows = rows_of(file)
    return [float(row["ratio"]) for row in rows if has_gain(row) and all(row[key] == x for key, x in wanted.items())]


def _of(implementation: str) -> Callable[[str], Sequence[float]]:
    return lambda file: _ratios(file, implementation=implementation)


def _unpadded(file: str) -> list[float]:
    return [float(row["over_inductor"]) for row in rows_of(file) if row["over_inductor"] and float(row["fill"]) < 0.99]


def _sites(file: str) -> list[float]:
    """Inductor's time over that of the choice, for each site that both were timed at."""
    times: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows_of(file):
        if row["us_p50"] and row["side"] in ("inductor", "attn_compiler"):
            times.setdefault((row["draw"], row["number"], row["training"]), {})[row["side"]] = float(row["us_p50"])
    return [each["inductor"] / each["attn_compiler"] for each in times.values() if len(each) == 2]


def _decoded(file: str) -> list[float]:
    times: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows_of(file):
        times.setdefault((row["case"], row["filled"], row["what"]), {})[row["side"]] = float(row["step_ms"])
    return [each["inductor"] / each["attn_compiler"] for each in times.values()]


_CPU = "CPU, one thread"
GROUPS = (
    Group(words="models, attention as `sdpa`", where="H200", file="h200", of=_of("sdpa")),
    Group(words="models, attention as `eager`", where="H200", file="h200", of=_of("eager")),
    Group(words="models, against Inductor with FlexAttention", where="H200", file="h200", of=_of("flex_attention")),
    Group(words="models that nothing was tuned for", where="H200", file="held_out_h200", of=_ratios),
    Group(words="models that call FlexAttention", where="H200", file="flex_h200", of=_ratios),
    Group(words="attentions that a seed drew", where="H200", file="sites_h200", of=_sites),
    Group(words="others, with `time_kernels`", where="H200", file="sites_timed_h200", of=_sites),
    Group(words="decoding steps, static cache", where="H200", file="decode_models_h200", of=_decoded),
    Group(words="padded batches with `unpad`", where="H200", file="unpad_h200", of=_unpadded),
    Group(words="padded batches with `unpad`", where=_CPU, file="unpad_cpu", of=_unpadded),
    Group(words="models", where=_CPU, file="cpu", of=_ratios),
)


def glance() -> Iterator[str]:
    """Each group that was measured with its gain."""
    yield "| what | where | cases | gain | smallest |"
    yield "|---|---|---|---|---|"
    yield from (line for group in GROUPS if (line := group.line()) is not None)


def _table(rows: Sequence[Row], call: Callable[[Row], str]) -> Iterator[str]:
    """A line for each row, the largest gain of a model first."""
    yield "| model | call | Inductor, ms | ours, ms | gain |"
    yield "|---|---|---|---|---|"
    for row in rows:
        times = " | ".join(f"{float(row[f'{side}_p50_ms']):.3g}" for side in ("inductor", "attn_compiler"))
        yield f"| {MODELS.get(row['model'], row['model'])} | {call(row)} | {times} | {float(row['ratio']):.2f}x |"


def of_h200(implementation: str) -> Iterator[str]:
    """Each model and call of one implementation of attention."""
    rows = [row for row in rows_of("h200") if row["implementation"] == implementation and has_gain(row)]
    order = list(MODELS)
    return _table(
        sorted(rows, key=lambda row: (order.index(row["model"]), list(CALLS).index(row["scenario"]))),
        lambda row: CALLS[row["scenario"]],
    )


def held_out() -> Iterator[str]:
    """Each model that nothing was tuned for, and those without a gain."""
    path = RESULTS / "held_out_h200.csv"
    if not path.is_file():
        return
    with path.open(newline="", encoding="utf-8") as file:
        rows: list[Mapping[str, str]] = list(csv.DictReader(file))
    measured = sorted((row for row in rows if has_gain(row)), key=lambda row: -float(row["ratio"]))
    yield f"[Rows](../benchmarks/results/{path.name}), {measured[0]['date']}:\n"
    yield from _table(measured, lambda row: row["call"].replace("prefill padded", "prefill, padded"))
    failed = [row for row in rows if not row["ratio"]]
    if failed:
        yield f"\nWithout a figure ([why](measuring.md#held-out-models-without-a-gain)): {', '.join(_case(row) for row in failed)}."
    wrong = [row for row in rows if row["ratio"] and not has_gain(row)]
    if wrong:
        yield f"\nWrong, so without a gain ([why](measuring.md#held-out-models-without-a-gain)): {', '.join(_case(row) for row in wrong)}."


def _case(row: Row) -> str:
    return f"{row['model']} ({row['call']})"


def cpu() -> Iterator[str]:
    """Each model and call on a CPU."""
    rows = [row for row in rows_of("cpu") if row["ratio"]]
    return _table(rows, lambda row: f"{row['scenario']}, {row['implementation']}")
