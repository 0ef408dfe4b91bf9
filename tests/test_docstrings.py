"""Docstrings of the package are held to short sentences and paragraphs, as the pages are (tests/website/test_prose.py)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import attn_compiler
from website import prose

PACKAGE = Path(attn_compiler.__file__).parent
MOST_WORDS_OF_A_SENTENCE = 40

#: of clauses that leave a reader to find their subject
_NEVER_FIRST = frozenset("What Whether Of That Those Where How Which As".split())
#: where the next field, argument or file is explained
_FIELD = re.compile(r"(?<=[.;])\s+(?=[\w*.]+(?:, [\w*.]+)*: )")
_Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(source: str) -> Iterator[str]:
    """Those of a file, but of kernels: their text is in the keys that compiled kernels are kept under."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _Documented) and not any(map(_is_jit, getattr(node, "decorator_list", ()))):
            yield ast.get_docstring(node) or ""


def _is_jit(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).split("(")[0].rpartition(".")[2] == "jit"


def too_long(docstring: str) -> list[str]:
    """Each explained field is a paragraph of its own."""
    return prose.too_long(_FIELD.sub("\n\n", docstring), MOST_WORDS_OF_A_SENTENCE)


@pytest.mark.parametrize("folder", sorted({path.parent for path in PACKAGE.rglob("*.py")}), ids=lambda path: path.name)
def test_sentences_and_paragraphs_are_short(folder: Path) -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): [
            words for each in docstrings(path.read_text()) for words in too_long(each)
        ]
        for path in folder.glob("*.py")
    }
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize("folder", sorted({path.parent for path in PACKAGE.rglob("*.py")}), ids=lambda path: path.name)
def test_first_lines_are_imperatives_or_noun_phrases(folder: Path) -> None:
    first = {
        (path.name, each.split()[0]) for path in folder.glob("*.py") for each in docstrings(path.read_text()) if each
    }
    assert {(name, word) for name, word in first if word.strip("`,.:") in _NEVER_FIRST} == set()


def test_what_is_too_long_is_seen() -> None:
    long = " ".join(["word"] * 41) + "."
    assert len(too_long(f"Short. {long}")) == 1
    assert too_long(" ".join(["word"] * 40) + ".") == []
    forty = " ".join(["word"] * 39) + " end.\n"
    assert [each.split(":")[0] for each in too_long(forty * 4)] == ["a paragraph of 160 words"]


def test_fields_are_paragraphs_of_their_own() -> None:
    thirty = " ".join(["word"] * 30)
    fields = ("q, k", "mask", "*args", "scale", "rows")
    assert too_long(" ".join(f"{name}: {thirty}." for name in fields)) == []
    assert len(too_long(" ".join(f"{name} {thirty}." for name in fields))) == 1


def test_docstrings_of_kernels_are_left_out() -> None:
    source = '"""Module."""\n@gluon.jit(x=1)\ndef kernel():\n    """Kernel."""\ndef other():\n    """Other."""\n'
    assert sorted(docstrings(source)) == ["Module.", "Other."]
