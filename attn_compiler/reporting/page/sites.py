"""A card for each distinct attention: the lowering and the reasons, operands and copies, a drawing of the mask; one for each miss."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from rich.filesize import decimal

from attn_compiler.reasons.errors import described
from attn_compiler.reporting import render, wording
from attn_compiler.reporting.page import drawing
from attn_compiler.reporting.page.examples import Drawable, NotDrawn, drawable
from attn_compiler.reporting.page.grid import Grid, grid_of
from attn_compiler.reporting.page.markup import Markup, code, element, facts, folded, joined, table
from attn_compiler.spec.masks import Causal

if TYPE_CHECKING:
    from attn_compiler.reasons.decisions import Copy, Estimate, Faster, Reason
    from attn_compiler.reporting.facts import LinearReport, MissReport, SiteReport
    from attn_compiler.spec.attention import AttentionSpec, Dim, TensorSpec
    from attn_compiler.spec.masks import MaskSpec

#: the name of no lowering
_UNTOUCHED = "untouched"
#: characters of a mask shown unfolded
_LONGEST = 400


def site_card(site: SiteReport, identity: str) -> Markup:
    """Return a site's card. identity: of this site in its page."""
    head = element("h3", _names(site.modules), " ", _badge(site), id=identity)
    rows = element("div", _facts(site), _operands(site.spec), _copies(site.copies), class_="facts")
    body = element("div", rows, _mask(site, identity), class_="columns")
    return element(
        "article", head, body, _refusals(site), _places(site.modules), aria_labelledby=identity, class_="card"
    )


def again_card(site: SiteReport, identity: str, first: str) -> Markup:
    """Return a short card of a site that has a full one elsewhere. first: the identity of the full card."""
    head = element("h3", _names(site.modules), " ", _badge(site), id=identity)
    link = element("p", "All is as for ", element("a", "the same attention of another graph", href=f"#{first}"), ".")
    return element("article", head, link, _places(site.modules), aria_labelledby=identity, class_="card")


def _badge(site: SiteReport) -> Markup:
    lowering = site.decision.lowering
    return element("span", lowering, class_="badge kept" if lowering == _UNTOUCHED else "badge")


def linear_card(one: LinearReport, identity: str) -> Markup:
    """Return the card of a layer of linear attention."""
    badge = element("span", one.decision.lowering, class_="badge")
    rows = facts(
        (
            ("Computes", one.spec.words),
            ("Function", joined([code(one.function), "proved"], ", ")),
            ("Computed in", f"{one.spec.dtype}, {'needs grad' if one.spec.needs_grad else 'no grad'}"),
            ("Length", str(one.spec.length)),
            ("Why", one.evidence),
        )
    )
    head = element("h3", _names(one.modules), " ", badge, id=identity)
    return element("article", head, rows, _places(one.modules), aria_labelledby=identity, class_="card")


def miss_card(miss: MissReport, identity: str) -> Markup:
    """Return the card of a miss: the place where matching stopped, the reason, and the remedy."""
    head = element("h3", _names(miss.modules), " ", element("span", "miss", class_="badge miss"), id=identity)
    rows = facts(
        (
            ("Found", code(miss.anchor)),
            ("Stopped at", code(miss.stopped_at)),
            ("Nearest pattern", miss.nearest),
            ("Line of the model", code(miss.source) if miss.source else None),
            *reason_rows(miss.reason),
        )
    )
    return element("article", head, rows, _places(miss.modules), aria_labelledby=identity, class_="card")


def reason_rows(reason: Reason) -> tuple[tuple[str, Markup | str | None], ...]:
    """Return a refusal, a line for each of its parts."""
    remedy = element("strong", reason.remedy) if reason.remedy else None
    return (
        ("What has to hold", reason.rule),
        ("What was seen", reason.observed),
        ("Remedy", remedy),
        ("Code", code(reason.code)),
    )


def _names(modules: Iterable[str]) -> Markup:
    return joined([code(name) for name in render.abbreviate(modules)], ", ")


def _places(modules: tuple[str, ...]) -> Markup | None:
    if len(modules) < 2:
        return None
    paths = [element("li", code(module or "(the model itself)")) for module in modules]
    return folded(f"All {len(modules)} places", element("ul", *paths, class_="paths"))


def _facts(site: SiteReport) -> Markup:
    spec = site.spec
    return facts(
        (
            ("Chosen", _chosen(site)),
            ("Why", _why(site)),
            ("Time", _time(site)),
            ("Line of the model", code(site.source) if site.source else None),
            ("Written as", site.pattern),
            *_mask_words(spec.mask),
            ("Scores", spec.score.words),
            ("Added to scores", _long(spec.score.added) if spec.score.added else None),
            ("Computed in", render.dtype_words(spec)),
            ("Length", None if site.evidence is None else site.evidence.length),
            ("Faster, if installed", None if site.faster is None else _faster(site.faster)),
            ("Notes", element("ul", *(element("li", note) for note in site.notes)) if site.notes else None),
        )
    )


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


def _faster(faster: Faster) -> Markup:
    words = f" was {faster.speed:.2f} times as fast on sites like this one ({faster.since}; {faster.why}). "
    return joined((code(faster.lowering), words, code(faster.install)))


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


def _mask_words(mask: MaskSpec) -> list[tuple[str, Markup | None]]:
    return [
        ("Mask", _long(mask.words)),
        ("Formula", _long(mask.formula) if mask.formula else None),
        ("Not proved, since", _long(unproved) if (unproved := wording.unproved(mask)) else None),
    ]


def _long(words: str) -> Markup:
    if len(words) <= _LONGEST:
        return element("span", words, class_="formula")
    return folded(words[:_LONGEST] + "…", element("span", words, class_="formula"))


def _operands(spec: AttentionSpec) -> Markup:
    rows = [
        (
            ", ".join(names),
            operand.dtype,
            render.in_a_row(operand.shape),
            render.in_a_row(operand.strides),
            _size(operand),
        )
        for names, operand in render.operands(spec)
    ]
    columns = ("Operand", "Type", "Shape (B, H, S, D)", "Strides", "Bytes each")
    return table("What it reads", columns, rows, numbers=frozenset({2, 3, 4}))


def _size(tensor: TensorSpec) -> str:
    sizes = [size for size in tensor.shape if isinstance(size, int)]
    if len(sizes) < len(tensor.shape):
        return "known at run time"
    return decimal(math.prod(sizes) * getattr(torch, tensor.dtype).itemsize)


def _copies(copies: tuple[Copy, ...]) -> Markup:
    if not copies:
        return element("p", "No operand is copied.", class_="aside")
    rows = [
        (copy.operand, "known at run time" if copy.bytes is None else decimal(copy.bytes), copy.why) for copy in copies
    ]
    known = sum(copy.bytes or 0 for copy in copies)
    caption = "Copies" + (f", {decimal(known)} a call" if all(copy.bytes is not None for copy in copies) else "")
    return table(caption, ("Operand", "Bytes", "Why"), rows, numbers=frozenset({1}))


def _refusals(site: SiteReport) -> Markup | None:
    refusals = site.decision.refusals
    if not refusals:
        return None
    rows = [
        (
            ", ".join(lowerings),
            reason.rule,
            reason.observed,
            element("strong", reason.remedy) if reason.remedy else "none",
            code(reason.code),
        )
        for lowerings, reasons in render.by_reasons(refusals)
        for reason in reasons
    ]
    columns = ("Lowering", "What has to hold", "What was seen", "Remedy", "Code")
    return folded(
        f"Refused: {wording.counted(len(refusals), 'lowering')}", table("Why each was not taken", columns, rows)
    )


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
