"""Facts of a report, each read and worded once. Table, JSON and page iterate these lists, and name no fact themselves."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from attn_compiler.reasons.decisions import Copy, Reason, Refusal
from attn_compiler.reporting import wording
from attn_compiler.reporting.facts import GraphReport, LinearReport, MissReport, SiteReport, UnpadReport
from attn_compiler.spec.attention import AttentionSpec, TensorSpec

Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True, slots=True)
class Column(Generic[Record]):
    """One fact of a record.

    key: its key in the JSON; "": it has none.
    label: of its row in the table of details; "": it has none.
    brief: of its row in the short report; "-": it stands in the head of a block; "": it has none.
    title: its name on the page; "": it has none, or another place there.
    read: its value; by default the field `key`.
    words: the value for people; by default a tuple as lines, and anything else as `str` has it.
    style: "name" is written as code, "formula" may be long, "lowering" and "remedy" stand out.
    """

    key: str = ""
    label: str = ""
    brief: str = ""
    title: str = ""
    read: Callable[[Record], Any] | None = None
    words: Callable[[Record], str | tuple[str, ...] | None] | None = None
    style: Literal["", "name", "formula", "lowering", "remedy"] = ""

    def value(self, record: Record) -> Any:
        return getattr(record, self.key) if self.read is None else self.read(record)

    def lines(self, record: Record) -> tuple[str, ...]:
        """Return the fact as lines of text; none if the record lacks the fact."""
        found = self.value(record) if self.words is None else self.words(record)
        return found if isinstance(found, tuple) else () if found in (None, "") else (str(found),)


#: beginnings of notes on what an option did
_ASKED_FOR = ("checkpoint:", "context parallel:", "fp8_recipe:")
REASON: tuple[Column[Reason], ...] = (
    Column(key="rule", title="What has to hold"),
    Column(key="observed", title="What was seen"),
    Column(key="remedy", title="Remedy", read=lambda x: x.advice, style="remedy"),
    Column(key="code", title="Code", style="name"),
)
SITE: tuple[Column[SiteReport], ...] = (
    Column(key="modules"),
    Column(key="lowering", label="lowering", read=lambda x: x.decision.lowering, brief="-", style="lowering"),
    Column(key="pattern", label="pattern", title="Written as"),
    Column(key="spec", read=lambda x: json.loads(x.spec.to_text())),
    Column(key="mask", label="mask", title="Mask", brief="mask", read=lambda x: x.spec.mask.words, style="formula"),
    Column(key="mask_formula", label="formula", title="Formula", read=lambda x: x.spec.mask.formula, style="formula"),
    Column(
        key="mask_unproved",
        label="unproved",
        title="Not proved, since",
        read=lambda x: wording.unproved(x.spec.mask),
        style="formula",
    ),
    Column(key="reads_pairs"),
    Column(key="proved_as_dense", label="read as", title="Read as", words=lambda x: _read_as(x)),
    Column(key="score", label="score", title="Scores", read=lambda x: x.spec.score.words),
    Column(
        key="score_added",
        label="added",
        brief="added",
        title="Added to scores",
        read=lambda x: x.spec.score.added,
        style="formula",
    ),
    Column(label="dtype", title="Computed in", read=lambda x: _dtypes(x.spec)),
    Column(label="q, k, v", read=lambda x: x.spec),
    Column(label="length", title="Length", read=lambda x: x.evidence and x.evidence.length),
    Column(brief="-", read=lambda x: x.estimate and x.estimate.words),
    Column(key="source", label="source", title="Line of the model", brief="-", style="name"),
    Column(brief="why", read=lambda x: _why(x)),
    Column(brief="copies", read=lambda x: _copies(x.copies)),
    Column(brief="remedy", read=lambda x: _remedies(x), style="remedy"),
    Column(key="remedies", label="remedy", title="Remedy", style="remedy"),
    Column(
        key="copies",
        label="copies",
        words=lambda x: tuple(f"{each.operand}, {size(each.bytes)}: {each.why}" for each in x.copies),
    ),
    Column(key="notes", label="notes", title="Notes"),
    Column(brief="notes", read=lambda x: tuple(note for note in x.notes if note.startswith(_ASKED_FOR))),
    *(Column(key=key) for key in ("evidence", "estimate")),
    Column(
        key="faster",
        label="faster",
        brief="faster",
        title="Faster, if installed",
        words=lambda x: x.faster.words if x.faster else None,
    ),
    Column(key="refusals", label="refused", read=lambda x: x.decision.refusals),
)
LINEAR: tuple[Column[LinearReport], ...] = (
    Column(key="modules"),
    Column(key="lowering", label="lowering", read=lambda x: x.decision.lowering, brief="-", style="lowering"),
    Column(key="computes", label="computes", title="Computes", brief="computes", read=lambda x: x.spec.words),
    Column(key="function", label="function", title="Function", words=lambda x: f"{x.function}, proved"),
    Column(key="spec"),
    Column(label="dtype", title="Computed in", read=lambda x: f"{x.spec.dtype}, {_gradient(x.spec.needs_grad)}"),
    Column(label="length", title="Length", read=lambda x: x.spec.length),
    Column(key="evidence", title="Why", brief="why"),
    Column(key="refusals", label="refused", read=lambda x: x.decision.refusals),
)
MISS: tuple[Column[MissReport], ...] = (
    Column(key="modules"),
    Column(key="anchor", label="anchor", title="Found", brief="-", style="name"),
    Column(
        key="nearest",
        label="nearest",
        title="Nearest pattern",
        words=lambda x: f"{x.nearest}, stopped at {x.stopped_at}",
    ),
    Column(key="stopped_at"),
    Column(key="source", label="source", title="Line of the model", brief="-", style="name"),
    Column(key="reason", label="why", brief="why"),
)
UNPAD: tuple[Column[UnpadReport], ...] = (
    Column(key="kept"),
    Column(key="shares"),
    Column(key="module"),
    Column(key="source"),
    Column(key="zeroed", title="0 at padding", words=lambda x: ", ".join(x.zeroed)),
    Column(key="facts", title="Asked at each call"),
    Column(key="notes", title="Notes"),
    Column(
        key="last",
        title="Real tokens of the last batches",
        words=lambda x: "" if x.shares else ", ".join(f"{step.fill:.0%}" for step in x.last),
    ),
    Column(title="Tokens computed of the last batches", words=lambda x: _shared(x)),
    Column(title="Padding was computed", words=lambda x: () if x.shares else _computed(x)),
    Column(title="Each row was computed", words=lambda x: _computed(x) if x.shares else ()),
)
GRAPH: tuple[Column[GraphReport], ...] = (
    *(Column(key=key) for key in ("graph", "model", "target", "num_sites", "num_misses", "sites", "misses")),
    *(Column(key=key) for key in ("num_linear", "linear")),
    Column(key="seconds", read=lambda x: [{"pass": name, "seconds": took} for name, took in x.seconds]),
    Column(key="kernels", read=lambda x: [{"kernel": name, "seconds": took} for name, took in x.kernels]),
    *(
        Column(key=key)
        for key in ("failure", "faults", "from_cache", "not_kept", "untried", "unpad", "dumped", "compiled_in")
    ),
)
_RECORDS: Mapping[type, tuple[Column[Any], ...]] = {
    GraphReport: GRAPH,
    SiteReport: SITE,
    LinearReport: LINEAR,
    MissReport: MISS,
    UnpadReport: UNPAD,
    Reason: REASON,
}


def as_data(value: Any) -> Any:
    """Return a value of the JSON: a record by its list of columns, other data by its fields, a tuple as a list."""
    if dataclasses.is_dataclass(value):
        columns = next((columns for kind, columns in _RECORDS.items() if isinstance(value, kind)), None)
        if columns is not None:
            return {column.key: as_data(column.value(value)) for column in columns if column.key}
        return {field.name: as_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [as_data(each) for each in value] if isinstance(value, list | tuple) else value


def _why(site: SiteReport) -> str:
    """Return why this lowering computes the site: what is unknown of its mask, the measurement, who refused."""
    unproved, evidence, refused = wording.unproved(site.spec.mask), site.evidence, by_reasons(site.decision.refusals)
    lines = [f"not proved, since {unproved}"] if unproved else []
    lines += filter(None, [_read_as(site)])
    if evidence is not None and site.decision.lowering in evidence.order:
        lines.append(f"{'measured' if evidence.measured else 'not measured here'}, {evidence.since}: {evidence.why}")
    if site.decision.lowering == "untouched":
        told = (
            (names, "; ".join(f"{x.rule}, observed {x.observed} ({x.code})" for x in all_)) for names, all_ in refused
        )
    else:
        told = ((names, ", ".join(dict.fromkeys(str(x.code) for x in all_))) for names, all_ in refused)
    said = [f"{' and '.join(names)} ({reasons})" for names, reasons in told]
    return "; ".join([*lines, *([f"refused: {', '.join(said)}"] if said else [])])


def _remedies(site: SiteReport) -> tuple[str, ...]:
    """Return what a user can do about the site: those of its model's code, and of all refusals if no kernel takes it."""
    refused = site.decision.refusals if site.decision.lowering == "untouched" else ()
    return tuple(dict.fromkeys([*site.remedies, *(reason.advice for one in refused for reason in one.reasons)]))


def _copies(copies: Iterable[Copy]) -> tuple[str, ...]:
    """Return a line for each cause of copies."""
    same: dict[str, list[str]] = {}
    for copy in copies:
        same.setdefault(copy.why, []).append(f"{copy.operand} {size(copy.bytes)}")
    return tuple(f"{', '.join(operands)}: {why}" for why, operands in same.items())


def _dtypes(spec: AttentionSpec) -> str:
    goes_on = "" if spec.out_dtype == spec.dtype else f", goes on as {spec.out_dtype}"
    weights = ", returns the weights" if spec.returns_weights else ""
    lse = "" if spec.lse == "unread" else f", its logsumexp is {spec.lse}"
    return f"{spec.dtype}{goes_on}, {_gradient(spec.needs_grad)}{weights}{lse}"


def _read_as(site: SiteReport) -> str | None:
    """Return the tensor over pairs that is read although all that it holds was proved; None if there is none."""
    tensor = site.spec.added_tensor if site.proved_as_dense else None
    return None if tensor is None else f"proved, read as a dense tensor: {tensor.words.removeprefix('dense ')}"


def _gradient(needed: bool) -> str:
    return "needs grad" if needed else "no grad"


def size(number: int | None) -> str:
    """Return a number of bytes in words."""
    # A process that finds a kept rewrite imports no rich.
    from rich.filesize import decimal

    return "size known at run time" if number is None else decimal(number)


def _computed(unpad: UnpadReport) -> tuple[str, ...]:
    failed = Counter(reason for step in unpad.last for reason in step.failed)
    return tuple(f"{wording.counted(number, 'time')}, since not: {why}" for why, number in failed.items())


def _shared(unpad: UnpadReport) -> str:
    """Say how many tokens of the last batches were computed, or could have been."""
    if not unpad.shares:
        return ""
    of = (wording.counted(step.groups or 0, "prompt") for step in unpad.last)
    return ", ".join(f"{step.number} of {step.positions} ({words})" for step, words in zip(unpad.last, of, strict=True))


def operands(spec: AttentionSpec) -> list[tuple[list[str], TensorSpec]]:
    """Return the operands of a site. Equal operands are one, with the names of all."""
    same: dict[TensorSpec, list[str]] = {}
    kept = () if spec.stored is None else (("k in the cache", spec.stored.k), ("v in the cache", spec.stored.v))
    for name, operand in (("q", spec.q), ("k", spec.k), ("v", spec.v), *kept):
        same.setdefault(operand, []).append(name)
    return [(names, operand) for operand, names in same.items()]


def by_reasons(refusals: Iterable[Refusal]) -> list[tuple[list[str], tuple[Reason, ...]]]:
    """Group lowerings with the same reasons, in the order in which they were asked."""
    names: dict[tuple[Reason, ...], list[str]] = {}
    for refusal in refusals:
        names.setdefault(refusal.reasons, []).append(refusal.lowering)
    return [(lowerings, reasons) for reasons, lowerings in names.items()]
