"""`python -m website codes` prints docs/codes.md as the site shows it, with its tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from website import tables


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one page."""
    found = tables.pages()
    parser = argparse.ArgumentParser(prog="python -m website", description=__doc__)
    parser.add_argument("page", choices=found)
    sys.stdout.write(tables.shown(found[parser.parse_args(arguments).page]))


if __name__ == "__main__":
    main()
