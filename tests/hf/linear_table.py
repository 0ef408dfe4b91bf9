"""`python -m tests.hf.linear_table --docs tests/hf/linear_families.md`: each family of linear attention in each scenario, as a table."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console

from tests.hf.linear_families import FAMILIES, LinearFamily
from tests.hf.linear_scenarios import SCENARIOS, Shown, show

BEGIN, END = "<!-- families: python -m tests.hf.linear_table -->", "<!-- end of families -->"
DTYPES = (torch.float64, torch.float32)

#: of a family, by scenario and dtype
Row = Mapping[tuple[str, torch.dtype], Shown]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exits with 1 where a layer was not found, or a number is not eager's."""
    parser = argparse.ArgumentParser(prog="python -m tests.hf.linear_table", description=__doc__)
    parser.add_argument(
        "--docs", type=Path, help="page with the table, whose rows of the families that are run are replaced"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="a family, by its folder in transformers"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console, is_right = Console(), True
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            if options.only and family.name not in options.only:
                continue
            row: dict[tuple[str, torch.dtype], Shown] = {}
            for scenario in SCENARIOS:
                for dtype in DTYPES:
                    row[scenario, dtype] = shown = show(family, scenario, dtype, Path(folder))
                    is_right &= shown.is_right(dtype)
                    said = "ok" if shown.is_right(dtype) else "WRONG"
                    console.print(f"{family.name}, {scenario}, {dtype}: {said} {shown}", markup=False, soft_wrap=True)
            if options.docs is not None:
                options.docs.write_text(with_row(options.docs.read_text(), family, row))
    return int(not is_right)


def with_row(page: str, family: LinearFamily, row: Row) -> str:
    """The page with the family's row in place of the one that it had; in the order of FAMILIES."""
    before, _, rest = page.partition(BEGIN)
    held, _, after = rest.partition(END)
    rows = {line.split("|")[1].strip(): line for line in held.splitlines() if line.startswith("| ")}
    rows[family.name] = markdown(family, row)
    head = f"| family | recurrence | found | {' | '.join(SCENARIOS)} |\n|{'---|' * (3 + len(SCENARIOS))}\n"
    body = "".join(f"{rows[one.name]}\n" for one in FAMILIES if one.name in rows)
    return f"{before}{BEGIN}\n\n{head}{body}\n{END}{after}"


def markdown(family: LinearFamily, row: Row) -> str:
    """One line: how many calls were found, and the largest difference in each scenario, in float64 and in float32. Wrong ones are bold."""
    found, wanted = (sum(getattr(shown, name) for shown in row.values()) for name in ("found", "wanted"))
    cells = [", ".join(_number(row.get((scenario, dtype)), dtype) for dtype in DTYPES) for scenario in SCENARIOS]
    return f"| {family.name} | {family.kind} | {found} of {wanted} | {' | '.join(cells)} |"


def _number(shown: Shown | None, dtype: torch.dtype) -> str:
    if shown is None:
        return "not run"
    return f"{shown.farthest:.0e}" if shown.is_right(dtype) else f"**{shown.farthest:.0e}**"


if __name__ == "__main__":
    sys.exit(main())
