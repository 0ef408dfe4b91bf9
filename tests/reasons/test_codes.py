"""Codes of reasons and their pages."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attn_compiler.reasons import errors, pages
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.reasons.errors import AttnCompilerError
from attn_compiler.reasons.pages import PAGES, SECTIONS, ExampleKind, Page, page_of, read
from website import prose

# Codes.
PACKAGE = Path(errors.__file__).parents[1]
#: makes a reason, or becomes one; and where in its arguments the code stands, if it has no name there
MAKERS = {"Reason": None, "Refused": 0, "KeepsPadding": 0, "refuse": 0}
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


# Remedies.
#: Sentences of remedies that are assembled: what is put in counts as one word.
_PUT_IN = "x"


def _texts(value: ast.expr) -> list[str]:
    """The texts that an expression may be; none of one that is not written out."""
    if isinstance(value, ast.IfExp):
        return _texts(value.body) + _texts(value.orelse)
    if isinstance(value, ast.JoinedStr):
        return ["".join(x.value if isinstance(x, ast.Constant) else _PUT_IN for x in value.values)]
    return [value.value] if isinstance(value, ast.Constant) and isinstance(value.value, str) else []


def _remedies(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        named = isinstance(node, ast.Assign) and "remedy" in ast.unparse(node.targets[0]).lower()
        if isinstance(node, ast.keyword | ast.Assign) and (named or getattr(node, "arg", "") == "remedy"):
            yield from _texts(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "refuse" and len(node.args) > 3:
            yield from _texts(node.args[3])


def test_a_remedy_is_one_short_sentence() -> None:
    found = [remedy for _, tree in _sources() for remedy in _remedies(tree)]
    found += [pages.advice(code) for code in PAGES]
    assert [each for each in found if len(each.split()) > prose.MOST_WORDS_OF_A_SENTENCE or ". " in each] == []
    assert len(found) > 200


def test_a_reason_without_a_remedy_has_that_of_its_page() -> None:
    reason = Reason(code=Code.SINKS, rule="no sinks", observed="sinks")
    assert reason.advice.startswith("there is nothing to do: our Triton kernels")
    assert str(reason) == f"no sinks; observed sinks; {reason.advice} (AC302)"
    assert dataclasses.replace(reason, remedy="drop them").advice == "drop them"


# Pages of codes.
ROOT = Path(__file__).parents[2]
#: codes that no small program on a CPU meets: what it takes stands on the page
TOLD = frozenset(
    {
        # A GPU and a library.
        *(Code.NO_PLAN, Code.NOT_COMPILED, Code.CUDNN_REFUSED, Code.LIBRARY_ARGUMENTS, Code.IN_ORDER_SLOWER),
        Code.ADDED_SLOWER,
        # Several processes.
        *(Code.CONTEXT_PARALLEL_UNSUPPORTED, Code.CONTEXT_PARALLEL_INPUT),
        *(Code.SHARDED_SEQUENCE, Code.PLACEMENTS, Code.SHARDED_DROPOUT, Code.UNEQUAL_SHARES, Code.NO_LOCAL_ATTENTION),
        # A fault of ours, or of the compiler.
        *(
            Code.FAULT,
            Code.COMPILER_REFUSED,
            Code.PASS_FAILED,
            Code.COMPILE_FAILED,
            Code.KERNEL_FAILED,
            Code.VERIFY_FAILED,
        ),
        Code.VERIFICATION_MISMATCH,
        # A model that is larger than an example.
        # A function in a file of its own.
        Code.LINEAR_NOT_PROVED,
        *(Code.INSIDE_A_CALL, Code.CLOSED_TENSOR, Code.AUTOCAST_BODY),
        *(Code.PADDING_SIZES, Code.PADDING_OUT_OF_REACH),
    }
)
_RUN = [page for page in PAGES.values() if page.kind is not ExampleKind.TOLD]


@pytest.mark.parametrize("page", _RUN, ids=lambda page: str(page.code))
@pytest.mark.filterwarnings("ignore")
def test_its_example_gives_the_code(page: Page) -> None:
    # Imported here: with it come torch and the passes.
    from website.examples import own_line

    assert own_line(page) is not None


def test_what_examples_in_words_name_is_there() -> None:
    told = [page.example for page in PAGES.values() if page.kind is ExampleKind.TOLD]
    named = [path for text in told for path in re.findall(r"\b(?:tests|benchmarks)/[\w/.]+", text)]
    assert named
    assert [path for path in named if not (ROOT / path.rstrip(".")).exists()] == []


def test_every_code_has_one_page_in_the_order_of_codes() -> None:
    found = [page for _, of_section in SECTIONS for page in of_section]
    assert [page.code for page in found] == sorted(Code, key=str)
    assert len({page.title for page in found}) == len(found)


def test_a_section_has_one_group_of_codes() -> None:
    groups = [{str(page.code)[:3] for page in of_section} for _, of_section in SECTIONS]
    assert groups == [{f"AC{number}"} for number in range(1, len(SECTIONS) + 1)]


def test_pages_say_everything_in_sentences() -> None:
    for page in PAGES.values():
        assert page.cause.endswith((".", "`.")), page.code
        assert page.remedy.endswith((".", "`.")), page.code
        assert not page.title.endswith("."), page.code


def test_sentences_are_short() -> None:
    assert prose.too_long(Path(pages.__file__).with_suffix(".md").read_text(encoding="utf-8")) == []


def test_codes_without_an_example_to_run_are_known() -> None:
    assert {page.code for page in PAGES.values() if page.kind is ExampleKind.TOLD} == TOLD


_ONE = "## Masks\n\n### AC201: A title\n\nA cause\nof two lines.\n\n**What to do.** A\nremedy.\n\n"


def test_a_page_is_read_with_its_lines_joined_and_its_example_as_it_is() -> None:
    ((heading, (page,)),) = read(f"# Top\n\n{_ONE}```python program\nmodel = 1\n\ninputs = ()\n```\n")
    assert (heading, page.code, page.title) == ("Masks", Code.DTYPE, "A title")
    assert (page.cause, page.remedy) == ("A cause of two lines.", "A remedy.")
    assert (page.kind, page.example) == (ExampleKind.PROGRAM, "model = 1\n\ninputs = ()")
    ((_, (page,)),) = read(f"{_ONE}**Example.** Take\ntwo GPUs.\n")
    assert (page.kind, page.example) == (ExampleKind.TOLD, "Take two GPUs.")


def test_a_page_that_lacks_a_part_is_an_error() -> None:
    with pytest.raises(ValueError, match="the page of AC201 lacks"):
        list(read(_ONE))


def test_pages_come_without_torch() -> None:
    code = "import sys; import attn_compiler.reasons.pages; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_a_page_is_found_by_its_code_in_any_case() -> None:
    assert page_of("ac201") is PAGES[Code.DTYPE]
    assert page_of("AC999") is None
