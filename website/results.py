"""Tables of docs/gain.md: what was measured, a CSV a table."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from website import links
from website.gains import CALLS, MODELS, RESULTS, Row, has_gain, rows_of

#: the gain from which on two times are alike
SLOWER = 0.98


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
        slower = sum(ratio < SLOWER for ratio in found)
        return f"| {self.words} | {self.where} | {link} | {mean:.2f}x | {slower or ''} | {min(found):.2f}x |"


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
        # A wrong result has no gain.
        if row["us_p50"] and row["side"] in ("inductor", "attn_compiler") and row["numerics"] != "WRONG":
            times.setdefault((row["draw"], row["number"], row["training"]), {})[row["side"]] = float(row["us_p50"])
    return [each["inductor"] / each["attn_compiler"] for each in times.values() if len(each) == 2]


def _decoded(file: str) -> list[float]:
    times: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows_of(file):
        times.setdefault((row["case"], row["filled"], row["what"]), {})[row["side"]] = float(row["step_ms"])
    return [each["inductor"] / each["attn_compiler"] for each in times.values()]


_CPU = "CPU, one thread"
GROUPS = (
    Group(words="held-out models", where="H200", file="held_out_h200", of=_ratios),
    Group(words="models, attention as `sdpa`", where="H200", file="h200", of=_of("sdpa")),
    Group(words="models, attention as `eager`", where="H200", file="h200", of=_of("eager")),
    Group(words="models, against Inductor with FlexAttention", where="H200", file="h200", of=_of("flex_attention")),
    Group(words="models that call FlexAttention", where="H200", file="flex_h200", of=_ratios),
    Group(words="randomly generated attentions", where="H200", file="sites_h200", of=_sites),
    Group(words="other random attentions, with `time_kernels`", where="H200", file="sites_timed_h200", of=_sites),
    Group(words="decoding steps, static cache", where="H200", file="decode_models_h200", of=_decoded),
    Group(words="padded batches with `unpad`", where="H200", file="unpad_h200", of=_unpadded),
    Group(words="padded batches with `unpad`", where=_CPU, file="unpad_cpu", of=_unpadded),
    Group(words="models", where=_CPU, file="cpu", of=_ratios),
)


def glance() -> Iterator[str]:
    """Each group that was measured with its gain."""
    yield f"| what | where | cases | gain | below {SLOWER}x | smallest |"
    yield "|---|---|---|---|---|---|"
    yield from (line for group in GROUPS if (line := group.line()) is not None)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A part of the page of ratios. file: the CSV, a case a row. call: what is said of a row. model, ours, gain: columns."""

    words: str
    file: str
    call: Callable[[Row], str]
    model: str = "model"
    ours: str = "attn_compiler_p50_ms"
    gain: str = "ratio"

    def lines(self) -> Iterator[str]:
        """The summary, each case with a link to its row, the slowest first, and what has no gain."""
        # A row is a line of the file: no cell has a line break.
        numbered = [
            ({**row, "ratio": row[self.gain]}, number) for number, row in enumerate(rows_of(self.file), start=2)
        ]
        measured = sorted((each for each in numbered if has_gain(each[0])), key=lambda each: float(each[0]["ratio"]))
        ratios = [float(row["ratio"]) for row, _ in measured]
        yield f"### {self.words}\n"
        yield f"{len(ratios)} cases: geometric mean {statistics.geometric_mean(ratios):.2f}x, the slowest {min(ratios):.2f}x.\n"
        yield "| model | call | card | torch | date | Inductor, ms | ours, ms | gain |"
        yield "|---|---|---|---|---|---|---|---|"
        for row, number in measured:
            where = (row["device"].removeprefix("NVIDIA "), row["torch"].partition("+")[0], row["date"])
            times = (f"{float(row[column]):.3g}" for column in ("inductor_p50_ms", self.ours))
            gain = f"[{float(row['ratio']):.2f}x](../benchmarks/results/{self.file}.csv#L{number})"
            yield f"| {' | '.join((self._model(row), self.call(row), *where, *times, gain))} |"
        left = [f"{self._model(row)} ({self.call(row)})" for row, _ in numbered if not has_gain(row)]
        if left:
            yield f"\nWrong, or without a figure ([why](measuring.md#held-out-models-without-a-gain)): {', '.join(left)}."

    def page(self) -> Iterator[str]:
        """All columns of each row, below the number of its line. It is found by links alone."""
        yield "---\nsearch:\n  exclude: true\n---\n"
        yield f"# {self.words}: all columns\n\nThe rows of [the CSV](../../benchmarks/results/{self.file}.csv).\n"
        for number, row in enumerate(rows_of(self.file), start=2):
            yield f"## {self._model(row)} ({self.call(row)}) {{#L{number}}}\n\n| column | value |\n|---|---|"
            yield from (f"| {key} | {_PUNCTUATION.sub(_escaped, value)} |" for key, value in row.items() if value)
            yield ""

    def _model(self, row: Row) -> str:
        return MODELS.get(row[self.model], row[self.model])


#: what Markdown and its tables give a meaning
_PUNCTUATION = re.compile(r"[_*`|<>&\[\]\\]")


def _escaped(found: re.Match[str]) -> str:
    return f"&#{ord(found[0])};"


def _unpad_call(row: Row) -> str:
    return f"{'training' if row['training'] == 'yes' else 'inference'}, {row['inputs']}, {float(row['fill']):.0%} real"


SOURCES = (
    Source(words="Held-out models", file="held_out_h200", call=lambda row: row["call"]),
    Source(words="Models", file="h200", call=lambda row: f"{CALLS[row['scenario']]}, {row['implementation']}"),
    Source(
        words="Models that call FlexAttention", file="flex_h200", call=lambda row: f"{row['call']}, {row['length']}"
    ),
    Source(words="Several GPUs", file="parallel_gpus", call=lambda row: f"{row['way']}, {row['ranks']} GPUs"),
    Source(
        words="Padding left out, on a GPU",
        file="unpad_h200",
        model="case",
        call=lambda row: f"{_unpad_call(row)}{row['mode'] and ', '}{row['mode']}",
        ours="unpad_p50_ms",
        gain="over_inductor",
    ),
    Source(
        words="Padding left out, on a CPU",
        file="unpad_cpu",
        model="case",
        call=_unpad_call,
        ours="unpad_p50_ms",
        gain="over_inductor",
    ),
    Source(words="On a CPU", file="cpu", call=lambda row: f"{row['scenario']}, {row['implementation']}"),
)


def ratios() -> str:
    """Each source that was measured."""
    return "\n\n".join("\n".join(source.lines()) for source in _sources())


def pages() -> dict[str, str]:
    """The pages that links of `ratios` lead to, by their paths in the site."""
    return {links.rows_of(source.file): "\n".join(source.page()) for source in _sources()}


def _sources() -> Iterator[Source]:
    return (source for source in SOURCES if (RESULTS / f"{source.file}.csv").is_file())
