"""The table as a CSV (a row a call) and as a page: what is found, proved and chosen, and for each thing that is missing why."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.hf.today.running import DATA, NONE, PARTLY, PROVED, TARGETS, Row

COLUMNS = (
    "model", "call", "device", "status", "found", "total",
    *(f"masks_{state}" for state in (NONE, PROVED, PARTLY, DATA)), *TARGETS, "misses", "unproved", "why", "graphs",
    "seconds", "detail",
)  # fmt: skip
#: characters of a reason on the page; the CSV has all of it
_MOST = 150
#: names of models in a cell
_NAMES = 8


def write_csv(rows: Sequence[Row], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(_csv_row(row) for row in rows)


def _csv_row(row: Row) -> list[str]:
    masks = [str(row.masks.get(state, 0)) for state in (NONE, PROVED, PARTLY, DATA)]
    kernels = [_counted(row.kernels.get(machine, {})) for machine in TARGETS]
    texts = [_counted(row.misses), "; ".join(row.unproved), "; ".join(row.why)]
    head = [row.model, row.call, row.device, row.status, str(row.found), str(row.total)]
    return [*head, *masks, *kernels, *texts, str(row.graphs), f"{row.seconds:.1f}", row.detail]


def read_csv(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return [_read(row) for row in csv.DictReader(file)]


def _read(row: Mapping[str, str]) -> Row:
    texts = {name: row[name] for name in ("model", "call", "device", "status", "detail")}
    numbers = {name: int(row[name]) for name in ("found", "total", "graphs")}
    return Row(
        **texts,
        **numbers,  # type: ignore[arg-type]
        seconds=float(row["seconds"]),
        misses=_counts(row["misses"]),
        masks={state: count for state in (NONE, PROVED, PARTLY, DATA) if (count := int(row[f"masks_{state}"]))},
        unproved=tuple(filter(None, row["unproved"].split("; "))),
        kernels={machine: _counts(row[machine]) for machine in TARGETS},
        # A reason has semicolons of its own.
        why=tuple(filter(None, re.split(r"; (?=sm\d+: )", row["why"]))),
    )


def _counts(cell: str) -> dict[str, int]:
    return {name: int(count) for name, count in re.findall(r"(.+?) x (\d+)(?:; |$)", cell)}


def lines(rows: Sequence[Row]) -> list[str]:
    """The tables of docs/models.md."""
    return [
        *_summary(rows),
        "",
        "### The table",
        "",
        "| model | call | found | misses | masks | " + " | ".join(TARGETS) + " |",
        "|---" * (5 + len(TARGETS)) + "|",
        *(_line(row) for row in rows if row.status == "ok"),
        "",
        *_section("Misses", ((_of_any_length(name), row) for row in rows for name in row.misses)),
        *_section("Masks that are not proved as a whole", ((name, row) for row in rows for name in row.unproved)),
        *_section("Why a machine gets PyTorch's kernel with a dense mask, or none", _by_reason(rows)),
        *_section("Not run", ((row.detail, row) for row in rows if row.status != "ok")),
    ]


def _summary(rows: Sequence[Row]) -> list[str]:
    ran = [row for row in rows if row.status == "ok"]
    masks: Counter[str] = Counter()
    for row in ran:
        masks.update(row.masks)
    masked = sum(masks.values()) - masks[NONE]
    share = f" ({masks[PROVED] / masked:.1%})" if masked else ""
    lines = [
        f"{len({row.model for row in ran})} models, {len(ran)} calls. {sum(row.found for row in ran)} of {sum(row.total for row in ran)} "
        f"attentions are found. Of {masked} masks {masks[PROVED]} are proved as a whole{share}, {masks[PARTLY]} in part, "
        f"{masks[DATA]} are data; {masks[NONE]} attentions have none.",
        "",
        "| machine | kernels of ours | PyTorch's | PyTorch's with a dense mask | none |",
        "|---|---|---|---|---|",
    ]
    for machine in TARGETS:
        kinds: Counter[str] = Counter()
        for row in ran:
            for name, count in row.kernels.get(machine, {}).items():
                kinds["dense" if name.endswith("*") else "pytorch" if name.startswith("sdpa_") else "ours"] += count
            kinds["none"] += row.slow(machine)
        kinds["ours"] -= kinds["none"]
        lines.append(f"| {machine} | {kinds['ours']} | {kinds['pytorch']} | {kinds['dense']} | {kinds['none']} |")
    return lines


def _line(row: Row) -> str:
    name = row.model if row.device == "meta" else f"{row.model} †"
    found = f"{row.found}/{row.total}"
    masks = ", ".join(f"{count} {state}" for state, count in row.masks.items())
    kernels = [_counted(row.kernels.get(machine, {}), " × ").replace("sdpa_", "") for machine in TARGETS]
    codes: Counter[str] = Counter()
    for miss, count in row.misses.items():
        codes[miss.partition(" ")[0]] += count
    misses = ", ".join(f"{count} {code}" for code, count in codes.items())
    cells = [name, row.call, found if row.found == row.total else f"**{found}**", misses, masks, *kernels]
    return f"| {' | '.join(cells)} |"


def _counted(counts: Mapping[str, int], times: str = " x ") -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return "; ".join(
        name if len(counts) == 1 and times != " x " else f"{name}{times}{count}" for name, count in ordered
    )


def _by_reason(rows: Sequence[Row]) -> Iterator[tuple[str, Row]]:
    """Each reason with its machines in front of it."""
    machines: dict[str, dict[str, None]] = {}
    told = [(row, *name.partition(": ")[::2]) for row in rows for name in row.why]
    for _, machine, reason in told:
        machines.setdefault(reason, {})[machine] = None
    for row, _, reason in told:
        yield f"{', '.join(machines[reason])}: {reason}", row


def _of_any_length(miss: str) -> str:
    """Without how many ops a layer has, which goes by the call."""
    return re.sub(r", in \d+ plain ops a layer$", "", miss)


def _section(title: str, rows: Iterable[tuple[str, Row]]) -> list[str]:
    """Each text with the models that it is said of."""
    models: dict[str, dict[str, None]] = {}
    for text, row in rows:
        models.setdefault(text if len(text) <= _MOST else f"{text[:_MOST].rstrip()}…", {})[row.model] = None
    if not models:
        return []
    told = [f"| {text} | {_few([*names])} |" for text, names in models.items()]
    return [f"### {title}", "", "| what | models |", "|---|---|", *told, ""]


def _few(names: Sequence[str]) -> str:
    """The first names, and how many more there are: the rows have all."""
    more = len(names) - _NAMES
    return ", ".join(names[:_NAMES]) + (f" and {more} more" if more > 0 else "")
