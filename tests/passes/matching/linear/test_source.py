"""A digest of what a function and those that it calls do, and what speaks against taking one."""

from __future__ import annotations

import ast
import inspect
import math
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from attn_compiler.passes.matching.linear import looking, proving, source, vocabulary
from attn_compiler.passes.matching.linear.templates import TEMPLATES
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


@pytest.mark.parametrize("name", linear_variants._PARTS)
def test_each_function_of_transformers_has_a_row(name: str) -> None:
    template = looking.template_of(linear_variants.own(name))
    assert template is not None
    assert template.by_token is (
        name not in ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan")
    )


def test_a_row_with_more_parameters_comes_before_one_with_fewer() -> None:
    for place, one in enumerate(TEMPLATES):
        assert not any(other.parameters < one.parameters for other in TEMPLATES[:place])


def test_optional_roles_are_roles() -> None:
    for one in TEMPLATES:
        assert one.optional <= one.operands.keys()


def test_other_parameters_are_none_of_ours() -> None:
    assert looking.template_of(linear_functions.plain) is None
    assert looking.template_of(linear_functions.by_token) is TEMPLATES[1]
    assert "query" in inspect.signature(linear_functions.plain).parameters


def _chains(body: str) -> list[Any]:
    text = "def f(x, y):\n" + "\n".join(f"    {line}" for line in body.splitlines())
    (tree,) = ast.parse(text).body
    assert isinstance(tree, ast.FunctionDef)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return list(vocabulary.chains(tree, frozenset(names - {"x", "y", "z"})))


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("return x.sum(-1).mul_(y)", []),
        ("z: torch.Tensor = x.to(y.dtype)\nreturn z", []),
        ("return torch.exp(x).mT @ y.shape[0]", [("torch", "exp")]),
        ("return F.pad(x, (0, y.size(1)))", [("F", "pad")]),
        ("return x * a.b.c + d", [("a", "b", "c"), ("d",)]),
        ("return a.b(x).sum() * (1, 2)[c]", [("a", "b"), ("c",)]),
        ("return [float(z) for z in (x, y)]", [("float",)]),
        ("raise ValueError(f'{x.shape} is wrong')", [("ValueError",)]),
        ("return x.is_cuda", ["line 2 reads `x.is_cuda`"]),
        ("return x.sum", ["line 2 reads `x.sum`"]),
        ("return x.item()", ["line 2 calls `x.item`"]),
        ("return x.device.type", ["line 2 reads `x.device.type`"]),
        ("return y(x)", ["line 2 calls `y`"]),
        ("return x[0](y)", ["line 2 calls `x[0]`"]),
        ("with x:\n    return y", ["line 2 has `with`"]),
        ("try:\n    return x\nexcept OSError:\n    return y", ["line 2 has `try`"]),
        ("match x:\n    case 64:\n        return y", ["line 2 has `match`"]),
        ("def z():\n    return x\nreturn z()", ["line 2 has `functiondef`", "line 4 calls `z`"]),
        ("return {1: x}[y]", ["line 2 has `dict`"]),
        ("global a\nreturn x", ["line 2 has `global`"]),
        ("return (yield x)", ["line 2 has `yield`"]),
        ("import a\nreturn x", ["line 2 has `import`"]),
        ("z = (w := x)\nreturn z", ["line 2 has `namedexpr`"]),
    ],
)
def test_what_is_read_elsewhere_and_what_is_no_word(body: str, found: list[Any]) -> None:
    assert _chains(body) == found


@pytest.mark.parametrize(
    ("value", "name", "expected"),
    [
        (len, "len", True),
        (min, "min", False),
        (max, "len", False),
        (math.sqrt, "sqrt", True),
        (torch.exp, "exp", True),
        (torch.einsum, "einsum", True),
        (F.softplus, "softplus", True),
        (torch.exp, "sqrt", False),
        (torch.get_default_dtype, "get_default_dtype", False),
        (torch.rand, "rand", False),
        (vocabulary.is_known, "exp", False),
        (1.0, "exp", False),
    ],
)
def test_functions_that_are_known(value: object, name: str, expected: bool) -> None:
    assert vocabulary.is_known(value, name) is expected


def test_a_function_that_stands_in_the_place_of_pytorchs_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def einsum(*given: Any) -> Any:
        return given

    einsum.__module__ = torch.einsum.__module__
    monkeypatch.setattr(torch, "einsum", einsum)
    assert not vocabulary.is_known(einsum, "einsum")


@pytest.mark.parametrize("value", [None, 1, 2.0, True, "x", (1, (2.0, None)), torch.float32, torch.contiguous_format])
def test_values_that_never_change(value: object) -> None:
    assert vocabulary.is_constant(value)


@pytest.mark.parametrize("value", [[1], {}, (1, []), torch.ones(1), object(), torch.Size((1,))])
def test_values_that_may_change(value: object) -> None:
    assert not vocabulary.is_constant(value)
