"""`python -m attn_compiler doctor`: what this machine has, and which lowerings can run on it. `... code AC201`: what a code means.

`python -m attn_compiler --version`: which version this is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import attn_compiler
from attn_compiler.reasons.errors import nearest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. argparse exits with 2 and the usage for anything it does not know."""
    parser = argparse.ArgumentParser(prog="python -m attn_compiler", description=__doc__)
    parser.add_argument("--version", action="store_true", help="print which version this is")
    commands = parser.add_subparsers(dest="command", metavar="command")
    doctor = commands.add_parser("doctor", help="versions, GPUs, and which lowerings can run here, or why not")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of tables")
    code = commands.add_parser("code", help="what a code of a report means, and what to do")
    code.add_argument("code", help="AC201, say")
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] not in commands.choices:
        for near in nearest(given[0], commands.choices, limit=1):
            parser.error(f"there is no command {given[0]!r}; did you mean {near!r}?")
    parsed = parser.parse_args(given)
    if parsed.version:
        print(f"attn_compiler {attn_compiler.__version__}")
        return 0
    if parsed.command is None:
        parser.error("a command is needed")
    if parsed.command == "code":
        return _code(parsed.code)
    _doctor(as_json=parsed.json)
    return 0


def _code(name: str) -> int:
    from attn_compiler.reasons.pages import PAGES, page_of

    page = page_of(name)
    if page is None:
        first, *_, last = PAGES
        said = f"there is no code {name}; codes are {first} to {last}, and stand at the end of a reason in a report"
        print(said, file=sys.stderr)
        return 2
    print(f"{page.code}: {page.title}\n\n{page.cause}\n\nWhat to do: {page.remedy}\n\nExample:\n\n{page.example}")
    return 0


def _doctor(*, as_json: bool) -> None:
    # Imported late, so that the usage text does not wait for torch.
    from rich.console import Console

    from attn_compiler.reporting.doctor import examine, to_tables

    checkup = examine()
    if as_json:
        print(json.dumps(checkup.to_json(), indent=2))
        return
    console = Console()
    for table in to_tables(checkup):
        console.print(table)


if __name__ == "__main__":
    sys.exit(main())
