"""Text of a comparison: the run and its machine, a table of the sides, and the decision for each attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from attn_compiler.compiling.comparing.sides import EAGER
from attn_compiler.reporting import wording

if TYPE_CHECKING:
    from attn_compiler.compiling.comparing.measured import Measured
    from attn_compiler.compiling.comparing.results import Distance
    from attn_compiler.compiling.comparing.sides import Side

#: p80 over p20 above which times are unreliable
_SPREAD = 1.5
#: facts shown in the head; the others are in the JSON, and in `doctor`
_VERSIONS = ("attn_compiler", "torch", "triton", "transformers")


def view(found: Measured) -> RenderableType:
    """Return the comparison as text, at most as wide as a report."""
    step = "a training step" if found.training else "a forward without gradients"
    step = f"encode of {found.sentences} sentences" if found.sentences else step
    head = ", ".join(part for part in (f"{found.model}: {step}", found.modes) if part)
    parts: list[RenderableType] = [
        Text(head, style="bold"),
        _grid(_facts(found)),
        Text(),
        _table(found),
        Text(),
        *(Text(note, overflow="fold") for note in _notes(found)),
        Text(),
        Text(f"attn_compiler: {wording.totals(found.reports)}", overflow="fold"),
        *(Text(f"  {line}", overflow="fold") for line in _sites(found)),
    ]
    return Group(*parts)


def _facts(found: Measured) -> Iterator[tuple[str, str]]:
    yield "inputs", ", ".join(found.inputs) or "none"
    known = {fact.name: fact.value for fact in found.facts}
    gpus = [f"{name}: {value}" for name, value in known.items() if name.startswith("GPU ")]
    yield "machine", "; ".join([f"CPU: {known['CPU']}", *(gpus or ["no GPU"])])
    versions = [f"{name} {known[name]}" for name in _VERSIONS if known.get(name, "not installed") != "not installed"]
    yield "versions", ", ".join([f"Python {known['Python']}", *versions])
    options = found.settings.get("options") or {}
    given = [f"{name}={value!r}" for name, value in found.settings.items() if name != "options" and value is not None]
    given += [f"{name}={value}" for name, value in options.items()]
    if given:
        yield "options", ", ".join(given)


def _grid(rows: Iterator[tuple[str, str]]) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(label, Text(value, overflow="fold"))
    return grid


def _table(found: Measured) -> RenderableType:
    has_memory = any(side.peak_bytes is not None for side in found.sides)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    headings = ["first\nstep", "a step", "p20 to p80", "gain"]
    headings += ["peak\nmemory"] if has_memory else []
    headings += ["outputs\noff", *(["gradients\noff"] if found.training else [])]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for side in found.sides:
        first = "-" if side.first_seconds is None else wording.duration(side.first_seconds)
        cells = [first, *_times(side), "-" if side.ratio is None else f"{side.ratio:.2f}x"]
        cells += ["-" if side.peak_bytes is None else decimal(side.peak_bytes)] if has_memory else []
        cells += [_off(side.outputs), *([_off(side.gradients)] if found.training else [])]
        table.add_row(side.name, *cells)
    return table


def _times(side: Side) -> tuple[str, str]:
    if side.milliseconds is None:
        return "failed" if side.failure else "-", "-"
    p20, p50, p80 = side.milliseconds
    return f"{p50:.4g} ms", f"{p20:.4g} to {p80:.4g}"


def _is_spread(side: Side) -> bool:
    return side.milliseconds is not None and side.milliseconds[2] > _SPREAD * side.milliseconds[0]


def _off(difference: Distance | None) -> str:
    if difference is None:
        return "-"
    return f"{difference.largest:.2g}" + (" *" if difference.others else "")


def _notes(found: Measured) -> Iterator[str]:
    for side in found.sides:
        if side.failure is not None:
            yield f"{side.name} failed: {side.failure}"
    if any(_is_spread(side) for side in found.sides):
        yield "Times are far apart: something else ran on this machine, or steps differ. Compare again before you go by them."
    yield "gain: how many times as fast as Inductor, the median over rounds in which all took turns."
    yield from _sentence_notes(found)
    yield "first step: it compiles, and finds nothing on disk from before."
    yield from _memory_notes(found)
    for what in ("outputs", "gradients"):
        yield from _difference_notes(found, what)
    yield from _padding_notes(found)
    if found.drew_random_numbers:
        yield (
            "The model drew random numbers, others in every compiler: the differences tell nothing. model.eval() switches "
            "dropout off."
        )


def _sentence_notes(found: Measured) -> Iterator[str]:
    if not found.sentences:
        return
    timed = [(side.name, side.milliseconds[1]) for side in found.sides if side.milliseconds is not None]
    rates = [f"{name} {1e3 * found.sentences / ms:.4g}" for name, ms in timed]
    yield f"sentences a second: {', '.join(rates)}."
    known = [(side.name, side.outputs.cosine) for side in found.sides if side.outputs is not None]
    cosines = [f"{name} {cosine:.1e}" for name, cosine in known if cosine is not None]
    if cosines:
        yield f"1 - cosine to {EAGER}'s embedding, of the sentence that is farthest: {', '.join(cosines)}."


def _memory_notes(found: Measured) -> Iterator[str]:
    held = [side.held_bytes for side in found.sides if side.held_bytes is not None]
    if held:
        yield f"peak memory: of the GPU during a step; {decimal(min(held))} of it were held before one."
    else:
        yield "peak memory: not measured, since nothing is on a CUDA device."


def _padding_notes(found: Measured) -> Iterator[str]:
    known = {side.name: side.outputs.at_padding for side in found.sides if side.outputs is not None}
    there = [f"{far:.2g} ({name})" for name, far in known.items() if far is not None]
    if there:
        yield f"at padding, where attention_mask is 0: outputs are off by {', '.join(there)}. It does not count."
    zeroed = [name for report in found.reports if report.unpad is not None for name in report.unpad.zeroed]
    if zeroed:
        yield f"unpad: {', '.join(zeroed)} is 0 at padding."


def _difference_notes(found: Measured, what: str) -> Iterator[str]:
    known = {side.name: getattr(side, what) for side in found.sides if getattr(side, what) is not None}
    if not known:
        return
    beside = max(difference.beside for difference in known.values())
    places = {name: difference.where for name, difference in known.items() if difference.largest}
    if len(set(places.values())) == 1:
        told = f"; it is in {next(iter(places.values()))}"
    else:
        told = "".join(f"; of {name} it is in {place}" for name, place in places.items())
    yield f"{what} off: the largest difference from {EAGER}, whose largest number is {beside:.3g}{told}."
    others = {name: difference.others for name, difference in known.items() if difference.others}
    for name, names in others.items():
        yield f"* {name} and {EAGER} do not both have, or have in other shapes: {', '.join(names)}."


def _sites(found: Measured) -> Iterator[str]:
    for report in found.reports:
        for site in report.sites:
            yield f"{len(site.modules)} × {site.spec.mask.words}: {site.decision.lowering}"
        for miss in report.misses:
            yield f"miss at {', '.join(miss.modules[:2])}: {miss.reason}"
