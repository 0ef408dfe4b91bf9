"""Writes golden.csv and the table of decisions anew, and prints what changed: python -m tests.gate"""

from __future__ import annotations

import sys

from tests.gate import golden, table
from tests.lowerings import golden_decisions


def main() -> int:
    before = table.read(golden.PATH) if golden.PATH.exists() else {}
    now = golden.everything()
    table.write(golden.PATH, now)
    decided = golden_decisions.read() if golden_decisions.PATH.exists() else {}
    with golden_decisions.PATH.open("w", newline="") as file:
        golden_decisions.write(file)
    said = table.differences(before, now) + table.differences(decided, golden_decisions.read())
    sys.stdout.write("\n".join([*said, f"{len(said)} lines changed\n"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
