"""Whether a source distribution has what it has to: the license, the change log, the documents, the tests and what they read."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

#: files that have to be there, of each kind one
WANTED = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "README.md",
    "attn_compiler/lowerings/choice/priorities_sm90.csv",
    "attn_compiler/py.typed",
    "benchmarks/results/h200.csv",
    "constraints.txt",
    "docs/architecture.md",
    "docs/images/card.svg",
    "examples/quickstart.py",
    "noxfile.py",
    "pyproject.toml",
    "tests/conftest.py",
    "tests/graphs/decoder_layer.txt",
    "tests/lowerings/golden_decisions.csv",
)


def main(path: Path) -> int:
    """0 where nothing is missing and no compiled Python is there."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = sorted(set(WANTED) - names)
    unwanted = sorted(name for name in names if "__pycache__" in name)
    for title, found in (("missing in", missing), ("not wanted in", unwanted)):
        if found:
            print(f"{title} {path.name}: {', '.join(found)}", file=sys.stderr)
    return int(bool(missing or unwanted))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
