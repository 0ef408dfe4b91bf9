"""A card for each distinct attention: the lowering and the reasons, operands and copies, a drawing of the mask; one for each miss."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from attn_compiler.reasons.errors import described
from attn_compiler.reporting import render, wording
from attn_compiler.reporting.columns import LINEAR, MISS, REASON, SITE, Column, Record, by_reasons, operands, size
from attn_compiler.reporting.facts import LinearReport, MissReport, SiteReport
from attn_compiler.reporting.page import drawing
from attn_compiler.reporting.page.examples import Drawable, NotDrawn, drawable
from attn_compiler.reporting.page.grid import Grid, grid_of
from attn_compiler.reporting.page.markup import Content, Markup, code, element, facts, folded, joined, table
from attn_compiler.spec.masks import Causal

if TYPE_CHECKING:
    from attn_compiler.reasons.decisions import Copy, Estimate, Refusal
    from attn_compiler.spec.attention import AttentionSpec, Dim, TensorSpec
    from attn_compiler.spec.masks import MaskSpec

#: the name of no lowering
_UNTOUCHED = "untouched"
#: characters of a mask shown unfolded
_LONGEST = 400


def card(record: SiteReport | LinearReport | MissReport, identity: str, first: str) -> Markup:
    """Return the card of an attention or a miss. identity: of this card in its page. first: of the full card of the same attention."""
    lowering = "miss" if isinstance(record, MissReport) else record.decision.lowering
    badge = element("span", lowering, class_=f"badge{ {'miss': ' miss', _UNTOUCHED: ' kept'}.get(lowering, '') }")
    head = element("h3", names(record.modules), " ", badge, id=identity)
    again = "All is as for ", element("a", "the same attention of another graph", href=f"#{first}"), "."
    content = _content(record, identity) if first == identity else [element("p", *again)]
    return element("article", head, *content, _places(record.modules), aria_labelledby=identity, class_="card")


def _content(record: SiteReport | LinearReport | MissReport, identity: str) -> Sequence[Content]:
    match record:
        case MissReport():
            return [facts((*listed(MISS, record), *listed(REASON, record.reason)))]
        case LinearReport():
            return [facts(listed(LINEAR, record)), _refusals(record.decision.refusals)]
    own = (("Chosen", _chosen(record)), ("Why", _why(record)), ("Time", _time(record)))
    rows = (facts((*own, *listed(SITE, record))), _operands(record.spec), _copies(record.copies))
    body = element("div", element("div", *rows, class_="facts"), _mask(record, identity), class_="columns")
    return [body, _refusals(record.decision.refusals)]


def listed(columns: Iterable[Column[Record]], record: Record) -> Iterator[tuple[str, Content]]:
    """Yield the facts of a record that have a title, with their values."""
    for column in columns:
        lines = tuple(_STYLES[column.style](line) for line in column.lines(record)) if column.title else ()
        if lines:
            several = element("ul", *(element("li", line) for line in lines))
            yield column.title, lines[0] if len(lines) == 1 else several


def names(modules: Iterable[str]) -> Markup:
    """Return the abbreviated paths of modules."""
    return joined([code(name) for name in render.abbreviate(modules)], ", ")


def _places(modules: tuple[str, ...]) -> Markup | None:
    if len(modules) < 2:
        return None
    paths = [element("li", code(module or "(the model itself)")) for module in modules]
    return folded(f"All {len(modules)} places", element("ul", *paths, class_="paths"))


def _chosen(site: SiteReport) -> Markup:
    if site.decision.lowering == _UNTOUCHED:
        return joined((code(_UNTOUCHED), ": the model's own computation stays as it is"))
    return code(site.decision.lowering)


def _why(site: SiteReport) -> Markup | str:
    lowering, evidence, refused = site.decision.lowering, site.evidence, len(site.decision.refusals)
    all_refused = f"Every kernel that was asked refused: {refused} of {refused}, each with its reason below."
    if evidence is None:
        if lowering == _UNTOUCHED and refused:
            return all_refused
        return (
            "No measured order decided: the options name the lowerings to ask, or no measurement is for such a machine."
        )
    measured = f"{'Measured' if evidence.measured else 'Not measured here'}, {evidence.since}: {evidence.why}"
    if lowering in evidence.order:
        order = joined([code(name) if name != lowering else element("b", code(name)) for name in evidence.order], ", ")
        return joined(("The first that does not refuse, of ", order, ".", element("p", measured)))
    if lowering == _UNTOUCHED and refused:
        return joined((all_refused, element("p", measured)))
    if lowering == _UNTOUCHED:
        return joined(("No kernel was asked.", element("p", measured)))
    return "It is asked before all others for such a site, and does not refuse."


def _time(site: SiteReport) -> Markup | str:
    estimate = site.estimate
    if estimate is None:
        return "No estimate: nothing like this site was measured with this kernel."
    passes = "forward and backward" if site.spec.needs_grad else "forward"
    first = f"About {_milliseconds(estimate.milliseconds)} a call, {passes}."
    basis = (
        f"An estimate from speeds that were measured on {estimate.since}, {estimate.like}. This model was not timed."
    )
    tensor = _TENSOR if estimate.other is not None and _is_read_diagonal(site.spec.mask) else ""
    return joined((first, " ", _gain(estimate, len(site.modules)), element("p", joined((basis, tensor), " "))))


_TENSOR = (
    "PyTorch's kernel is taken to be told of the diagonal; with a mask tensor, as the model calls it, it takes longer."
)


def _is_read_diagonal(mask: MaskSpec) -> bool:
    """Return True if the model's tensor holds only a diagonal."""
    return bool(mask.read) and mask.reason is None and all(isinstance(kind, Causal) for kind in mask.kinds)


def _gain(estimate: Estimate, calls: int) -> Markup | str:
    if estimate.gained is None or estimate.other is None or estimate.other_milliseconds is None:
        return ""
    word = "gained" if estimate.gained >= 0 else "lost"
    amount = abs(estimate.gained)
    total = f", {_milliseconds(calls * amount)} in {calls} calls" if calls > 1 else ""
    gained = element("b", f"{_milliseconds(amount)} {word}{total}")
    return joined(
        (
            "PyTorch's ",
            code(estimate.other),
            f" takes about {_milliseconds(estimate.other_milliseconds)}: ",
            gained,
            ".",
        )
    )


def _milliseconds(value: float) -> str:
    return f"{value:.3g} ms" if value < 1000 else f"{value:,.0f} ms"


def _long(words: str) -> Markup:
    if len(words) <= _LONGEST:
        return element("span", words, class_="formula")
    return folded(words[:_LONGEST] + "…", element("span", words, class_="formula"))


_STYLES: Mapping[str, Callable[[str], Content]] = {
    "": str,
    "lowering": code,
    "name": code,
    "formula": _long,
    "remedy": functools.partial(element, "strong"),
}


def _operands(spec: AttentionSpec) -> Markup:
    rows = [
        (", ".join(names), each.dtype, render.in_a_row(each.shape), render.in_a_row(each.strides), size(_bytes(each)))
        for names, each in operands(spec)
    ]
    columns = ("Operand", "Type", "Shape (B, H, S, D)", "Strides", "Bytes each")
    return table("What it reads", columns, rows, numbers=frozenset({2, 3, 4}))


def _bytes(tensor: TensorSpec) -> int | None:
    sizes = [each for each in tensor.shape if isinstance(each, int)]
    return math.prod(sizes) * getattr(torch, tensor.dtype).itemsize if len(sizes) == len(tensor.shape) else None


def _copies(copies: tuple[Copy, ...]) -> Markup:
    if not copies:
        return element("p", "No operand is copied.", class_="aside")
    known = [copy.bytes for copy in copies if copy.bytes is not None]
    caption = "Copies" + (f", {size(sum(known))} a call" if len(known) == len(copies) else "")
    rows = [(copy.operand, size(copy.bytes), copy.why) for copy in copies]
    return table(caption, ("Operand", "Bytes", "Why"), rows, numbers=frozenset({1}))


def _refusals(refusals: tuple[Refusal, ...]) -> Markup | None:
    if not refusals:
        return None
    rows = [
        (", ".join(lowerings), *(dict(listed(REASON, reason)).get(column.title, "none") for column in REASON))
        for lowerings, reasons in by_reasons(refusals)
        for reason in reasons
    ]
    titles = ("Lowering", *(column.title for column in REASON))
    count = wording.counted(len(refusals), "lowering")
    return folded(f"Refused: {count}", table("Why each was not taken", titles, rows))


def _mask(site: SiteReport, identity: str) -> Markup:
    spec = site.spec
    drawn = _drawn(spec.mask, spec.seqlen_q, spec.seqlen_kv, bool(spec.score.proved))
    if isinstance(drawn, str):
        return element("p", drawn, class_="aside")
    mask, grid = drawn
    title = f"Which keys each query may use: {render.middle_left_out(spec.mask.words)}"
    said = (
        f"Tiles of {grid.tile} queries × {grid.tile} keys, as a kernel that knows the mask may compute them. "
        f"{drawing.share(grid)} of the pairs take part.",
        "" if grid.exact else "Some pairs of each tile were looked at, and not all.",
        f"An example, since it depends on what is known at run time only: {'; '.join(mask.made_up)}."
        if mask.made_up
        else "",
    )
    caption = element("figcaption", drawing.legend(grid), *(element("p", line) for line in said if line))
    return element("figure", drawing.drawing(grid, title, f"{identity}-mask"), caption)


@functools.lru_cache(maxsize=64)
def _drawn(mask: MaskSpec, seqlen_q: Dim, seqlen_kv: Dim, is_added: bool) -> tuple[Drawable, Grid] | str:
    """Return the drawing of a mask, or why there is none. Layers share masks."""
    try:
        found = drawable(mask, seqlen_q, seqlen_kv, is_added=is_added)
        return found, grid_of(found)
    except NotDrawn as why:
        return f"No drawing of the mask: {why}."
    except Exception as error:  # noqa: BLE001 (a drawing that fails costs no more than the drawing)
        return f"The drawing of the mask failed: {described(error)}."
