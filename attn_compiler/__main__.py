"""The command line: `python -m attn_compiler ...`.

`doctor`: what this machine has, and which lowerings can run on it.
`explain make.py:llama`: what is done to each attention of a model. `compare make.py:llama`: its times beside Inductor's.
`report train.py`: what is compiled in a script.
`code AC201`: what a code means. `--version`: which version this is.

`make.py:llama` is a function without arguments, of a file or of a module (`package.module:llama`). It gives the model and its inputs:
a dict of those with a name, or a tuple.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attn_compiler
from attn_compiler.reasons.errors import AttnCompilerError, nearest

if TYPE_CHECKING:
    from attn_compiler.compiling.comparing.comparison import Comparison
    from attn_compiler.reporting.report import Reports

_MODEL = "FILE.py:NAME or MODULE:NAME, of a function that gives (model, inputs)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. argparse exits with 2 and the usage for anything it does not know."""
    parser, commands = _parsers()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] not in commands:
        for near in nearest(given[0], commands, limit=1):
            parser.error(f"there is no command {given[0]!r}; did you mean {near!r}?")
    parsed = parser.parse_args(given)
    if parsed.version:
        print(f"attn_compiler {attn_compiler.__version__}")
        return 0
    if parsed.command is None:
        parser.error("a command is needed")
    try:
        return int(_COMMANDS[parsed.command](parsed))
    except (_WrongModelError, AttnCompilerError) as error:
        print(error, file=sys.stderr)
        return 2


def _parsers() -> tuple[argparse.ArgumentParser, Mapping[str, Any]]:
    parser = argparse.ArgumentParser(
        prog="python -m attn_compiler", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="store_true", help="print which version this is")
    commands = parser.add_subparsers(dest="command", metavar="command")
    doctor = commands.add_parser("doctor", help="versions, GPUs, and which lowerings can run here, or why not")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of tables")
    explain = commands.add_parser("explain", help="what is done to each attention of a model; runs it once")
    _take_model(explain)
    _take_page(explain)
    compare = commands.add_parser("compare", help="times, memory and differences of a model, beside Inductor's")
    _take_model(compare)
    compare.add_argument("--training", action="store_true", help="forward, loss and backward, and not forward alone")
    compare.add_argument("--seconds", type=float, default=10.0, help="how long steps are timed (default %(default)s)")
    report = commands.add_parser("report", help="run a script, and print what was compiled in it")
    _take_page(report)
    report.add_argument("--json", action="store_true", help="print JSON instead of text")
    report.add_argument("script", help="a Python file that calls torch.compile or model.compile")
    report.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    code = commands.add_parser("code", help="what a code of a report means, and what to do")
    code.add_argument("code", help="AC201, say")
    return parser, commands.choices


def _take_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=_MODEL)
    parser.add_argument("--mode", help="as torch.compile takes it")
    parser.add_argument("--dynamic", action="store_true", default=None, help="as torch.compile takes it")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of torch.compile's options: unpad=true, say",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _take_page(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--details", action="store_true", help="print all facts: operands, formulas, each refusal")
    parser.add_argument("--repro", type=int, default=0, metavar="N", help="print a program of the Nth site alone")
    parser.add_argument("--html", metavar="FILE", help="write a page with a drawing of each mask, too")


class _WrongModelError(Exception):
    """An argument that names no model."""


def _explain(parsed: argparse.Namespace) -> int:
    model, args, kwargs = _made(parsed.model)
    _show_reports(attn_compiler.explainer(**_settings(parsed))(model, *args, **kwargs), parsed)
    return 0


def _compare(parsed: argparse.Namespace) -> int:
    model, args, kwargs = _made(parsed.model)
    settings = {**_settings(parsed), "training": parsed.training, "seconds": parsed.seconds}
    _show(attn_compiler.comparer(**settings)(model, *args, **kwargs), as_json=parsed.json)
    return 0


def _report(parsed: argparse.Namespace) -> int:
    if not Path(parsed.script).is_file():
        raise _WrongModelError(f"there is no file {parsed.script!r}")
    sys.argv = [parsed.script, *parsed.arguments]
    sys.path.insert(0, str(Path(parsed.script).resolve().parent))
    try:
        runpy.run_path(parsed.script, run_name="__main__")
    finally:
        # Also of a script that ends by an exception, or by sys.exit.
        _show_reports(attn_compiler.reports(), parsed)
    return 0


def _show_reports(reports: Reports, parsed: argparse.Namespace) -> None:
    if parsed.repro:
        sites = [site for report in reports for site in report.sites]
        if not 0 < parsed.repro <= len(sites):
            raise _WrongModelError(f"--repro takes a number from 1 to {len(sites)}, of a site; got {parsed.repro}")
        print(sites[parsed.repro - 1].repro())
    elif parsed.details and not parsed.json:
        print(reports.details())
    else:
        _show(reports, as_json=parsed.json)
    if parsed.html:
        reports.save(parsed.html)


def _show(found: Reports | Comparison, *, as_json: bool) -> None:
    from rich.console import Console

    if as_json:
        print(found.to_json())
    elif sys.stdout.isatty():
        Console().print(found)
    else:
        print(found)


def _settings(parsed: argparse.Namespace) -> dict[str, Any]:
    return {"mode": parsed.mode, "dynamic": parsed.dynamic, "options": dict(map(_option, parsed.option))}


def _option(text: str) -> tuple[str, Any]:
    """ "unpad=true": a value is JSON, or else a word."""
    name, equals, value = text.partition("=")
    if not equals:
        raise _WrongModelError(f"--option takes NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _made(place: str) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    """The model that a function gives, its inputs without a name, and those with one."""
    where, _, name = place.rpartition(":")
    if not where or not name:
        raise _WrongModelError(f"the model is given as {_MODEL}; got {place!r}")
    module = _module(where)
    if not hasattr(module, name):
        near = nearest(name, vars(module), limit=1)
        raise _WrongModelError(f"{where} has no {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    made = getattr(module, name)()
    if not isinstance(made, tuple) or len(made) != 2:
        said = f"{len(made)} things" if isinstance(made, tuple) else f"a value of class {type(made).__name__}"
        raise _WrongModelError(f"{place} has to give two things, the model and its inputs; it gave {said}")
    model, inputs = made
    if isinstance(inputs, Mapping):
        return model, (), dict(inputs)
    sentences = isinstance(inputs, list) and bool(inputs) and all(isinstance(x, str) for x in inputs)
    return model, tuple(inputs) if isinstance(inputs, tuple | list) and not sentences else (inputs,), {}


def _module(where: str) -> Any:
    if not where.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise _WrongModelError(f"no module {where!r} can be imported: {error}") from error
    file = Path(where)
    if not file.is_file():
        raise _WrongModelError(f"there is no file {where!r}")
    sys.path.insert(0, str(file.resolve().parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise _WrongModelError(f"{where!r} can't be loaded as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def _code(parsed: argparse.Namespace) -> int:
    from attn_compiler.reasons.pages import PAGES, ExampleKind, page_of

    page = page_of(parsed.code)
    if page is None:
        first, *_, last = PAGES
        said = (
            f"there is no code {parsed.code}; codes are {first} to {last}, and stand at the end of a reason in a report"
        )
        print(said, file=sys.stderr)
        return 2
    # A decision's example asks a lowering on a made-up machine, which no user can.
    is_users = page.kind is not ExampleKind.DECISION
    example = page.example if is_users else 'print(attn_compiler.explain(model, **inputs))  # named below "refused"'
    print(f"{page.code}: {page.title}\n\n{page.cause}\n\nWhat to do: {page.remedy}\n\nExample:\n\n{example}")
    return 0


def _doctor(parsed: argparse.Namespace) -> int:
    # Imported late, so that the usage text does not wait for torch.
    from rich.console import Console

    from attn_compiler.reporting.doctor import examine, to_tables

    checkup = examine()
    if parsed.json:
        print(json.dumps(checkup.to_json(), indent=2))
        return 0
    console = Console()
    for table in to_tables(checkup):
        console.print(table)
    return 0


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "doctor": _doctor,
    "explain": _explain,
    "compare": _compare,
    "report": _report,
    "code": _code,
}


if __name__ == "__main__":
    sys.exit(main())
