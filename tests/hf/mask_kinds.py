"""What the mask of a site was proved to be, in a word or two: the columns of the survey's table of mask kinds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from attn_compiler.reporting.facts import SiteReport
from attn_compiler.reporting.report import Report
from attn_compiler.spec import masks
from attn_compiler.spec.chosen_keys import say_all_of

#: proved kind -> its name in the table; a formula is proved too, but has no name
NAMES: Mapping[type, str] = {
    masks.Causal: "causal",
    masks.CausalFrom: "causal from",
    masks.SlidingWindow: "window",
    masks.Prefix: "prefix",
    masks.KeyPadding: "key padding",
    masks.KeyBound: "key bound",
    masks.Document: "document",
    masks.Chunked: "chunks",
    masks.AnyOf: "either",
    masks.Formula: "formula",
}
NO_MASK, READY_MADE, DENSE = "no mask", "ready-made", "dense"
CHOSEN = "chosen keys"
#: how meaning.py words that a mask came in from outside of the graph
_FROM_OUTSIDE = "is an input of the graph"


def kind_of(site: SiteReport) -> str:
    """ "no mask" (none, or one proved true everywhere), the names of the proved kinds, "ready-made" or "dense".

    Of a mask that was read in part the names and "dense", or "chosen keys" where the rest is those that rows of indices name."""
    mask = site.spec.mask
    if mask.read:
        rest = [_rest(mask)] if mask.is_partial else []
        return " ∧ ".join(dict.fromkeys([*(NAMES[type(kind)] for kind in mask.read), *rest]))
    if site.spec.score.by_highest:
        return NAMES[masks.KeyPadding]
    if mask.dense is None:
        return NAMES[masks.Causal] if mask.is_causal else NO_MASK
    return READY_MADE if _FROM_OUTSIDE in (mask.reason or "") else DENSE if mask.reason else NO_MASK


def _rest(mask: masks.MaskSpec) -> str:
    return CHOSEN if mask.rest is not None and say_all_of(mask.rest.condition, mask.chosen) else DENSE


def counted(reports: Iterable[tuple[Report, int]]) -> tuple[tuple[str, int], ...]:
    """(kind, sites) over reports and how often each one's graph ran, most frequent first."""
    found: Counter[str] = Counter()
    for report, runs in reports:
        for site in report.sites:
            found[kind_of(site)] += len(site.modules) * runs
    return tuple(found.most_common())


def reasons(reports: Iterable[Report]) -> tuple[str, ...]:
    """Why masks that were made in the graph stayed dense, each reason once."""
    sites = (site for report in reports for site in report.sites)
    return tuple(dict.fromkeys(site.spec.mask.reason or "" for site in sites if DENSE in kind_of(site)))


def is_proved(kind: str) -> bool:
    """Whether every part of the mask has a name."""
    return not {NO_MASK, READY_MADE, DENSE, NAMES[masks.Formula]} & set(kind.split(" ∧ "))


def table(rows: Sequence[tuple[str, tuple[tuple[str, int], ...]]]) -> list[str]:
    """Markdown: a row a family, a column a kind; how many of the masks made in the graph are proved. rows: (family, counted)."""
    totals: Counter[str] = Counter()
    families: dict[str, Counter[str]] = defaultdict(Counter)
    for family, kinds in rows:
        families[family].update(dict(kinds))
        totals.update(dict(kinds))
    columns = [kind for kind, _ in totals.most_common()]
    made = sum(n for kind, n in totals.items() if kind not in (NO_MASK, READY_MADE))
    proved = sum(n for kind, n in totals.items() if is_proved(kind))
    share = f" ({proved / made:.1%})" if made else ""
    lines = [
        f"Sites by what their mask was proved to be: {proved} of {made}{share} whose mask is made in the graph have a proved kind.",
        "",
        "| family | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for family, kinds_of in (*families.items(), ("all", totals)):
        lines.append(f"| {family} | " + " | ".join(str(kinds_of[kind] or "–") for kind in columns) + " |")
    return lines
