"""What a branch of a function may read: flags, ranks, what is None, numbers of heads, padding; and nothing else."""

from __future__ import annotations

import ast

import pytest

from attn_compiler.passes.matching.linear import branches


def _why(body: str) -> str | None:
    text = "def f(x, y, flag=False, state=None, chunk=64):\n" + "\n".join(f"    {line}" for line in body.splitlines())
    (tree,) = ast.parse(text).body
    assert isinstance(tree, ast.FunctionDef)
    return branches.why_not(tree)


@pytest.mark.parametrize(
    "body",
    [
        "return x if flag else y",
        "return x if not flag else y",
        "if state is None:\n    return x\nreturn y",
        "return x if state is not None and not flag else y",
        "if not is_torchdynamo_exporting():\n    x = y\nreturn x",
        "if len(x.shape) == 4:\n    return x\nreturn y",
        "return x if x.dim() == 3 else y",
        "b, s, h, d = x.shape\ng, e = y.shape[-2:]\nif h != g:\n    x = y\nreturn x",
        "pad = (chunk - x.shape[1] % chunk) % chunk\nif pad > 0:\n    x = y\nreturn x",
        "return [z for z in (x, y)]",
        "for i in range(x.shape[1]):\n    x = x + y\nreturn x",
    ],
)
def test_these_choose_by_flags_alone(body: str) -> None:
    assert _why(body) is None


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return x if x.sum() > 0 else y", "branches on `x.sum() > 0`"),
        ("return x if x.is_cuda else y", "branches on `x.is_cuda`"),
        ("return x if x.shape[0] > 8 else y", "branches on `x.shape[0] > 8`"),
        ("b, s, h, d = x.shape\nreturn x if b != s else y", "branches on `b != s`"),
        ("b, s, h, d = x.shape\ng, e = y.shape[-2:]\nh = b\nreturn x if h != g else y", "branches on `h != g`"),
        ("flag = x.sum()\nreturn x if flag else y", "branches on `flag`"),
        ("n = x.shape[0]\nreturn x if n > 0 else y", "branches on `n > 0`"),
        ("while state is None:\n    state = x\nreturn state if chunk else y", None),
        ("return (x, y)[x.shape[0] > 8]", "compares `x.shape[0] > 8`"),
        ("return x * (chunk > 64)", "compares `chunk > 64`"),
        ("return x if flag and x.shape[1] == 3 else y", "branches on `x.shape[1] == 3`"),
        ("assert x.shape[0] < 9\nreturn x", "branches on `x.shape[0] < 9`"),
        ("return [z for z in (x, y) if z.ndim > 2]", "branches on `z.ndim > 2`"),
        ("return x if other() else y", "branches on `other()`"),
        ("return flag and x or y", "compares"),
    ],
)
def test_these_may_choose_by_something_else(body: str, why: str | None) -> None:
    found = _why(body)
    assert found is None if why is None else why in str(found)
