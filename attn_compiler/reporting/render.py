"""Reports as a table for people: the same view in colour on a terminal (rich) and as plain text in a log file."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from attn_compiler.reasons.decisions import Reason, Refusal
from attn_compiler.reporting import wording
from attn_compiler.reporting.columns import LINEAR, MISS, SITE, UNPAD, Column, by_reasons, operands
from attn_compiler.spec.attention import AttentionSpec

if TYPE_CHECKING:
    from attn_compiler.reporting.facts import GraphReport, LinearReport, MissReport, SiteReport, UnpadReport

WIDTH = 88

#: the most characters of a mask's words in a table, and those from the end among them
_LONGEST, _END = 400, 80

_NO_GRAPH = """\
attn_compiler: no graph was compiled (was the model run, and is torch.compile enabled?)
  A method of what torch.compile returns, such as generate or encode, runs the plain model.
  model.compile(backend="attn_compiler") compiles the model in place, and its methods run that."""

#: the least share of the time of all passes that a pass is named with; the JSON has all of them
_SHARE_OF_A_STEP = 0.1
# A whole component of a module path ("layers.12.attn", "layers[12]"), not a digit of a name ("conv2d"). No leading zero,
# so that the number stands for the text.
_INDEX = re.compile(r"(?<!\w)(0|[1-9]\d*)(?!\w)")


def plain(view: RenderableType, width: int = WIDTH) -> str:
    """Return `view` as text without colours or trailing blanks, at most `width` columns wide if it can be broken."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(view)
    return "\n".join(line.rstrip() for line in buffer.getvalue().rstrip().splitlines())


def brief_view(reports: Sequence[GraphReport]) -> RenderableType:
    """Return a line for each graph and a block for each kind of attention in it. Graphs without attention share one line."""
    if not reports:
        return Text(_NO_GRAPH)
    shown = [report for report in reports if wording.has_content(report) or len(reports) == 1]
    empty = [report for report in reports if len(reports) > 1 and not wording.has_content(report)]
    views: list[RenderableType] = []
    for place, report in enumerate(shown):
        if not place or report.target != shown[place - 1].target:
            views.append(_text(f"attn_compiler on {report.target}"))
            views += [_text(said) for said in report.untried]
        views += [_text(_line(report), "bold"), *_slow(report), *_trouble(report)]
        if report.unpad is not None:
            views.append(_unpad_block(report.unpad))
        views += _blocks(report, _brief)
    views += [_text(wording.without_attention(empty))] if empty else []
    views += [_text(f"total: {wording.totals(reports)}", "bold")] if len(reports) > 1 else []
    return Group(*views)


def _blocks(report: GraphReport, of: Callable[..., RenderableType]) -> list[RenderableType]:
    """Return the block of each record of a graph: of sites, of layers of linear attention, of misses."""
    blocks = [of(f"[{number}]", SITE, site) for number, site in enumerate(report.sites, start=1)]
    blocks += [of(f"[linear {number}]", LINEAR, one) for number, one in enumerate(report.linear, start=1)]
    return blocks + [of("[miss]", MISS, miss) for miss in report.misses]


def _line(report: GraphReport) -> str:
    """Return one line on a graph: what was found, and what the passes took of its compilation."""
    took, whole = report.total_seconds, report.compiled_in
    share = f", {took / whole:.0%} of {wording.duration(whole)} to compile it" if whole else ""
    passes = f"; passes took {wording.duration(took)}{share}" if report.seconds else ""
    return f"graph {report.name}: {what_was_found(report)}{passes}{', from the cache' if report.from_cache else ''}"


def _slow(report: GraphReport) -> list[RenderableType]:
    """Name the passes that took more than a tenth of the graph's compilation."""
    least = _SHARE_OF_A_STEP * (report.compiled_in or report.total_seconds)
    slow = [f"{name} {wording.duration(took)}" for name, took in report.seconds if took > least]
    return [_text(f"    slow: {', '.join(slow)}")] if slow and report.compiled_in else []


def _brief(mark: str, columns: Iterable[Column[Any]], record: SiteReport | LinearReport | MissReport) -> RenderableType:
    head = [", ".join(abbreviate(record.modules))]
    head += [line for column in columns if column.brief == "-" for line in column.lines(record)]
    return _block(f"{mark} {' · '.join(head)}", {c: c.brief for c in columns if c.brief not in ("", "-")}, record)


def reports_view(reports: Sequence[GraphReport]) -> RenderableType:
    """Return every graph's report, and the totals if there are several. Graphs without attention share one line."""
    if not reports:
        return Text(_NO_GRAPH)
    if len(reports) == 1:
        return report_view(reports[0])
    empty = [report for report in reports if not wording.has_content(report)]
    views: list[RenderableType] = []
    for report in reports:
        if wording.has_content(report):
            views += [report_view(report), Text()]
    if empty:
        views += [_text(wording.without_attention(empty)), Text()]
    return Group(*views, _text(f"total: {wording.totals(reports)}", "bold"))


def report_view(report: GraphReport) -> RenderableType:
    """Return one graph's report: a line of totals, a block for each distinct site, then the misses."""
    head: list[RenderableType] = [
        _text(f"attn_compiler · graph {report.name} · {report.target}", "bold"),
        _text(what_was_found(report)),
    ]
    head += [_text(said) for said in report.untried]
    if report.seconds:
        slow = [(name, took) for name, took in report.seconds if took >= _SHARE_OF_A_STEP * report.total_seconds]
        head.append(_times(f"passes took {wording.duration(report.total_seconds)}:", slow))
    if report.from_cache:
        head.append(_text("rewrite: from the cache"))
    if report.not_kept:
        head.append(_text(f"rewrite: not kept for the next process: {report.not_kept}"))
    if report.kernels:
        head.append(_times("kernels compiled:", report.kernels))
    head += _trouble(report)
    if report.unpad is not None:
        head.append(_unpad_block(report.unpad))
    return Group(*head, *(part for block in _blocks(report, _detailed) for part in (Text(), block)))


def _trouble(report: GraphReport) -> list[RenderableType]:
    head: list[RenderableType] = []
    if report.failure:
        message, _, details = report.failure.partition("\n")
        head.append(_text(f"FAILED, the graph was left as it was: {message}", "bold red"))
        head += [Padding(_text(details.rstrip()), (0, 0, 0, 4))] if details.strip() else []
    return [*head, *(_text(f"FAULT: {fault}", "bold red") for fault in report.faults)]


def _unpad_block(unpad: UnpadReport) -> RenderableType:
    """Return the result of unpadding: one line, with its conditions below."""
    if unpad.kept is not None:
        place = f" at {unpad.module}" if unpad.module else ""
        line = f" ({unpad.source})" if unpad.source else ""
        why = f"{unpad.kept.rule}{place}{line}: {unpad.kept.observed}; {unpad.kept.advice} ({unpad.kept.code})"
        return _text(f"{unpad.title}: {unpad.result}, since not: {why}")
    titled = [(column.title, line) for column in UNPAD if column.title for line in column.lines(unpad)]
    lines = [f"  {title[0].lower()}{title[1:]}: {line}" for title, line in titled]
    return Group(*map(_text, [f"{unpad.title}: {unpad.result}", *lines]))


def abbreviate(modules: Iterable[str]) -> list[str]:
    """Join module paths that differ in their layer numbers alone: "model.layers.0-31.self_attn ×32". Exact: the abbreviations together
    name every path as often as it was given, and no other path."""
    families: dict[tuple[tuple[str, ...], int], list[tuple[int, ...]]] = {}
    for path, times in Counter(modules).items():
        pieces = _INDEX.split(path)
        families.setdefault((tuple(pieces[::2]), times), []).append(tuple(int(index) for index in pieces[1::2]))
    lines = []
    for (fixed, times), indices in families.items():
        for box in _boxes(indices):
            sites = times
            path = fixed[0]
            for numbers, piece in zip(box, fixed[1:], strict=True):
                sites *= len(numbers)
                path += _numbers(numbers) + piece
            lines.append((path or "(the model itself)") + (f" ×{sites}" if sites > 1 else ""))
    return lines


def _boxes(rows: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Cover the rows exactly by products of sets: {0,1} × {0..5} is one box, {(0,0),(1,0),(1,1)} takes two."""
    if not rows[0]:
        return [()]
    tails: dict[int, list[tuple[int, ...]]] = {}
    for head, *tail in rows:
        tails.setdefault(head, []).append(tuple(tail))
    heads: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for head, rest in tails.items():
        heads.setdefault(tuple(sorted(rest)), []).append(head)
    return [(tuple(sorted(same)), *box) for rest, same in heads.items() for box in _boxes(rest)]


def _numbers(values: tuple[int, ...]) -> str:
    """Return "7", "0-31", "{0,2,..,30}", "{0-4,6-10}"."""
    step = values[1] - values[0] if len(values) > 1 else 1
    if step > 1 and len(values) > 3 and values == tuple(range(values[0], values[-1] + 1, step)):
        return f"{{{values[0]},{values[1]},..,{values[-1]}}}"
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return parts[0] if len(parts) == 1 else "{" + ",".join(parts) + "}"


def middle_left_out(words: str) -> str:
    """Shorten words to a few lines: the end tells how a mask is applied, and the JSON has it all."""
    if len(words) <= _LONGEST:
        return words
    left_out = len(words) - _LONGEST
    return f"{words[: _LONGEST - _END]} … ({left_out} characters left out, which the JSON has) … {words[-_END:]}"


def _detailed(
    mark: str, columns: Iterable[Column[Any]], record: SiteReport | LinearReport | MissReport
) -> RenderableType:
    return _block(f"{mark} {', '.join(abbreviate(record.modules))}", {c: c.label for c in columns if c.label}, record)


def _block(
    head: str, columns: Mapping[Column[Any], str], record: SiteReport | LinearReport | MissReport
) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for column, label in columns.items():
        for place, row in enumerate(_rows(column, record)):
            grid.add_row("" if place else label, row)
    return Group(_text(head, "bold"), Padding(grid, (0, 0, 0, 4)))


def _rows(column: Column[Any], record: SiteReport | LinearReport | MissReport) -> list[RenderableType]:
    match column.value(record):
        case AttentionSpec() as spec:
            return [_operands(spec)]
        case Reason() as reason:
            return [_reason(reason)]
        case (Refusal(), *_) as refusals:
            return _refusals(refusals)
    lines = column.lines(record)
    if column.style == "formula":
        lines = tuple(map(middle_left_out, lines))
    return [_text(line, "green" if column.style == "lowering" else "") for line in lines]


def _operands(spec: AttentionSpec) -> RenderableType:
    """Return one line an operand; equal operands share it."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        grid.add_column(overflow="fold")
    for names, operand in operands(spec):
        grid.add_row(
            _text(",".join(names)),
            _text(f"{operand.dtype}[{in_a_row(operand.shape)}]"),
            _text(f"strides ({in_a_row(operand.strides)})"),
        )
    return grid


def _refusals(refusals: Iterable[Refusal]) -> list[RenderableType]:
    rows: list[RenderableType] = []
    for lowerings, reasons in by_reasons(refusals):
        indented = Padding(Group(*(_reason(reason) for reason in reasons)), (0, 0, 0, 2))
        rows.append(Group(_text(", ".join(lowerings), "yellow"), indented))
    return rows


def _reason(reason: Reason) -> RenderableType:
    said = _text(f"rule: {reason.rule}; observed: {reason.observed} ({reason.code})")
    return Group(said, _text(f"remedy: {reason.advice}"))


def what_was_found(report: GraphReport) -> str:
    sites, misses = report.num_sites, report.num_misses
    linear = wording.linear_totals([report])
    if not sites and not misses and not linear:
        return "0 sites: no attention was found in this graph"
    kinds = f" of {wording.counted(len(report.sites), 'kind')}" if sites > 1 else ""
    parts = [f"{wording.counted(sites, 'attention site')}{kinds}", *linear, wording.counted(misses, "miss", "misses")]
    return ", ".join(parts)


def _times(words: str, seconds: Iterable[tuple[str, float]]) -> RenderableType:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row(_text(words), _text(", ".join(f"{name} {wording.duration(each)}" for name, each in seconds)))
    return grid


def in_a_row(sizes: Iterable[int | str]) -> str:
    return ", ".join(map(str, sizes))


def _text(words: str, style: str = "") -> Text:
    # Text, not str: rich would read "[2, 8]" in a str as markup. Fold: break a path without a blank instead of cutting it.
    return Text(words, style=style, overflow="fold")
