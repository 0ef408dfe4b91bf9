"""A program that went wrong as a test file that is ready to run."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.program import Input, Program
from tests.fuzz.searching import Found

_HEAD = '''"""Found by the fuzzer ({rule}), {kind}:

    {text}
"""

from __future__ import annotations

import torch

from tests.fuzz.comparing import check
from tests.fuzz.program import Input, Program

PROGRAM = {program}


def test_{name}() -> None:
    check(PROGRAM)
'''


def name_of(found: Found) -> str:
    """The same for programs that are the same."""
    return f"{found.program.rule.replace(' ', '_')}_{hashlib.sha256(repr(found.program).encode()).hexdigest()[:8]}"


def write(found: Found, folder: Path) -> Path:
    """Write the test; gives its path."""
    name = name_of(found)
    text = " ".join(found.text.replace("\\\\", "/").replace('"""', "'''").split())[:400]
    source = _HEAD.format(
        rule=found.program.rule, kind=found.kind, text=text, program=literal(found.program), name=name
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"test_{name}.py"
    path.write_text(source)
    return path


def literal(program: Program) -> str:
    """The program as Python that makes it; its text can be read as it stands."""
    fields = [f"    {f.name}={_value(getattr(program, f.name))}," for f in _changed(program)]
    return "Program(\n" + "\n".join(fields) + "\n)"


def _changed(x: Any) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(x) if f.default is dataclasses.MISSING or getattr(x, f.name) != f.default]


def _value(x: Any) -> str:
    if isinstance(x, torch.dtype):
        return str(x)
    if isinstance(x, Input):
        return f"Input({', '.join(f'{f.name}={_value(getattr(x, f.name))}' for f in _changed(x))})"
    if (
        isinstance(x, tuple)
        and x
        and (isinstance(x[0], Input) or (isinstance(x[0], str) and any(" " in str(e) for e in x)))
    ):
        return "(\n" + "".join(f"        {_value(e)},\n" for e in x) + "    )"
    if isinstance(x, tuple):
        return f"({', '.join(map(_value, x))}{',' if len(x) == 1 else ''})"
    return '"' + x.replace("\\", "\\\\").replace('"', '\\"') + '"' if isinstance(x, str) else repr(x)
