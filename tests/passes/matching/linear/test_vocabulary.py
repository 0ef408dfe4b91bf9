"""Which words a text may be made of, and what it reads elsewhere."""

from __future__ import annotations

import ast
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from attn_compiler.passes.matching.linear import vocabulary


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
