"""Codes: each one is given somewhere, and whatever gives a reason gives a code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from attn_compiler.reasons import errors
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.errors import AttnCompilerError
from attn_compiler.reasons.pages import PAGES

PACKAGE = Path(errors.__file__).parents[1]
#: makes a reason, or becomes one; and where in its arguments the code stands, if it has no name there
MAKERS = {"Reason": None, "Refused": None, "KeepsPadding": 0}
#: gives on the code that it was given
PASSED_ON = "code"


def _sources() -> Iterator[tuple[Path, ast.Module]]:
    for path in PACKAGE.rglob("*.py"):
        yield path, ast.parse(path.read_text())


def _calls(tree: ast.Module) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MAKERS:
            yield node


def _given(call: ast.Call) -> ast.expr | None:
    assert isinstance(call.func, ast.Name)
    named = next((keyword.value for keyword in call.keywords if keyword.arg == "code"), None)
    place = MAKERS[call.func.id]
    return call.args[place] if named is None and place is not None and len(call.args) > place else named


def _names(value: ast.expr) -> list[str] | None:
    """The names of the codes that an expression may be; None if it is none that is written out."""
    if isinstance(value, ast.IfExp):
        both = _names(value.body), _names(value.orelse)
        return None if both[0] is None or both[1] is None else both[0] + both[1]
    is_code = isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id == "Code"
    return [value.attr] if is_code and isinstance(value, ast.Attribute) else None


def test_every_reason_has_a_code_that_is_written_where_it_is_made() -> None:
    found, wrong = 0, []
    for path, tree in _sources():
        for call in _calls(tree):
            value, found = _given(call), found + 1
            if isinstance(value, ast.Name) and value.id == PASSED_ON:
                continue
            names = None if value is None else _names(value)
            if names is None or not set(names) <= set(Code.__members__):
                wrong.append(f"{path.relative_to(PACKAGE)}:{call.lineno} {ast.unparse(call)}")
    assert wrong == []
    assert found > 150


def test_a_reason_without_a_code_is_seen() -> None:
    tree = ast.parse(
        "Reason(rule='a')\nKeepsPadding(rule, 'b')\nReason(code=Code.A if x else Code.B)\nReason(code=code)"
    )
    first, second, third, fourth = _calls(tree)
    assert _given(first) is None
    given = _given(second), _given(third), _given(fourth)
    assert [None if value is None else _names(value) for value in given] == [None, ["A", "B"], None]


def test_every_code_is_given_somewhere() -> None:
    used = set()
    for path, tree in _sources():
        if path.name == "codes.py":
            continue
        used |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "Code"
        }
    assert sorted(set(Code.__members__) - used) == []


def test_codes_are_of_one_form_and_none_is_given_twice() -> None:
    values = [code.value for code in Code.__members__.values()]
    assert all(re.fullmatch(r"AC[1-9]\d\d", value) for value in values)
    assert values == sorted(values)
    # An enum makes an alias of a second name for one value.
    assert len({code.name for code in Code}) == len(Code.__members__)


@pytest.mark.parametrize("error", AttnCompilerError.__subclasses__(), ids=lambda error: error.__name__)
def test_every_error_has_a_code_of_errors(error: type[AttnCompilerError]) -> None:
    assert error.code.value.startswith("AC9")
    assert error.code in PAGES
