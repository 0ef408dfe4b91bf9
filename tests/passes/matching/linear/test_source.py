"""A digest of what a function and those that it calls do, and what speaks against taking one."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from attn_compiler.passes.matching.linear import proving, source
from tests.near_miss import linear_variants
from tests.passes.matching.linear import linear_functions

_TEXT = "import torch\n\n\ndef helper(x):\n    return x + {number}\n\n\ndef f(x):{words}\n    return helper(torch.exp(x)){end}\n"


def _digest(folder: Path, name: str, **parts: str) -> str:
    values = {"number": "1", "words": "", "end": "", **parts}
    read = source.read(linear_variants.module_of(folder, name, _TEXT.format(**values)).f)
    assert read.why_not is None
    return read.digest


def test_words_beside_the_code_are_not_in_a_digest(tmp_path: Path) -> None:
    plain = _digest(tmp_path, "source_a")
    assert _digest(tmp_path, "source_b", words='\n    """What it does."""', end="  # a comment") == plain


def test_what_a_called_function_does_is_in_a_digest(tmp_path: Path) -> None:
    assert _digest(tmp_path, "source_c") != _digest(tmp_path, "source_d", number="2")


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (linear_functions.reads_a_global, None),
        (linear_functions.reads_a_list, "reads_a_list reads NUMBERS, which may change"),
        (linear_functions.calls_another, "reads_a_list reads NUMBERS, which may change"),
        (linear_functions.has_a_list, "a default of it is [2.0], which may change"),
        (linear_functions.has_two_names, "SCALE is a variable of its own and one of its module"),
        (linear_functions.of_another(2.0), "variables of another function"),
        (linear_functions.plain, None),
    ],
)
def test_what_may_change_elsewhere_speaks_against_a_function(function: types.FunctionType, why: str | None) -> None:
    read = source.read(function)
    assert read.why_not is None if why is None else why in str(read.why_not)


def test_a_text_that_is_not_what_runs_counts_for_nothing(tmp_path: Path) -> None:
    made = linear_variants.module_of(tmp_path, "source_e", _TEXT.format(number="1", words="", end=""))
    made.f.__code__ = (lambda x: x * 2).__code__.replace(co_filename=made.f.__code__.co_filename)
    assert "not at hand" in str(source.read(made.f).why_not)
    exec("def g(x):\n    return x\n", made.__dict__)
    assert "not at hand" in str(source.read(made.g).why_not)


def test_a_predicate_of_transformers_is_told_by_where_it_is_from(tmp_path: Path) -> None:
    text = "def is_torchdynamo_exporting():\n    return False\n\n\ndef f(x):\n    return x if is_torchdynamo_exporting() else x + 1\n"
    read = source.read(linear_variants.module_of(tmp_path, "source_f", text).f)
    assert "another function than transformers'" in str(read.why_not)


@pytest.mark.parametrize("name", linear_variants._PARTS)
def test_functions_of_transformers_are_those_that_were_read(name: str) -> None:
    read = source.read(linear_variants.own(name))
    assert read.why_not is None
    is_one_token = name == "mamba2_selective_state_update"
    assert (read.digest in proving.READ) is not is_one_token


def test_numbers_and_what_names_stand_for_are_in_a_digest(tmp_path: Path) -> None:
    text = "from math import exp, sqrt\n\nA, B = {a}, {b}\n\n\ndef f(x):\n    return x * g(A)\n\n\ndef g(x):\n    return x * B\n{more}"
    digests = []
    for i, (a, b, more) in enumerate(
        ((1.0, 2.0, ""), (2.0, 1.0, ""), (1, 2.0, ""), (1.0, 2.0, "\ng = exp\n"), (1.0, 2.0, "\ng = sqrt\n"))
    ):
        read = source.read(linear_variants.module_of(tmp_path, f"named_{i}", text.format(a=a, b=b, more=more)).f)
        assert read.why_not is None
        digests.append(read.digest)
    assert len(set(digests)) == len(digests)


def test_what_was_read_holds_until_it_changes(tmp_path: Path) -> None:
    made = linear_variants.module_of(tmp_path, "source_held", _TEXT.format(number="1", words="", end=""))
    read = source.read(made.f)
    assert read.holds()
    made.helper.__defaults__ = (3,)
    assert not read.holds()
    made.helper.__defaults__ = None
    assert read.holds()
    del made.helper
    assert not read.holds()
