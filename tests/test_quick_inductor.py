"""Kernels of a graph that are compiled as one file compute what each on its own computes. Strides are Inductor's, and processes of a group
compile one after another."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import sympy
import torch
from torch._inductor import async_compile, codecache, compile_fx, sizevars
from torch._inductor.codegen import cpp
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from tests import quick, quick_inductor
from tests.inductor_caches import no_graphs

pytestmark = pytest.mark.skipif(not quick.ON, reason="nothing is put into PyTorch in this run")


def _two_kernels(x: torch.Tensor) -> torch.Tensor:
    """The sum over rows comes between two loops; the count is an argument of a kernel where sizes are symbolic."""
    weights = (x * x.shape[0]).softmax(-1)
    return (weights.sum(0, keepdim=True) @ x.T).sin().cumsum(-1) + x.shape[1]


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many kernels came out of one file, for each file."""
    quick_inductor.install()
    compiled, numbers = quick_inductor._compiled, []

    def noted(kernels: list[Any], library: Any) -> list[Any]:
        found = compiled(kernels, library)
        numbers.append(sum(isinstance(each, functools.partial) for each in found))
        return found

    monkeypatch.setattr(quick_inductor, "_compiled", noted)
    return numbers


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_of_several_kernels(dynamic: bool, joined: list[int]) -> None:
    x = torch.randn(5, 33)
    with no_graphs():
        found = torch.compile(_two_kernels, dynamic=dynamic)(x)
    torch.testing.assert_close(found, _two_kernels(x))
    assert joined[-1] > 1


@pytest.mark.further
def test_what_can_not_be_compiled_together_is_compiled_alone(
    joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick_inductor, "_joined", lambda kernels: "this is no C++")
    x = torch.randn(6, 35)
    with no_graphs():
        torch.testing.assert_close(torch.compile(_two_kernels)(x), _two_kernels(x))
    assert joined[-1] == 0


_X, _Y = sympy.symbols("x y", integer=True, nonnegative=True)


@pytest.mark.parametrize(
    "index",
    [
        sympy.Integer(0),
        _X,
        _Y,
        3 * _X + 128 * _Y + 7,
        _X * _Y + 2 * _X,
        FloorDiv(_X, 16) + _Y,
        ModularIndexing(_X, 1, 32) + 32 * _Y,
        ModularIndexing(_X, 3, 5),
    ],
    ids=str,
)
def test_strides_are_inductor_s(index: Any) -> None:
    quick_inductor.install()
    quick = sizevars.stride_at_vec_range
    for var, width in ((_X, 16), (_Y, 16), (_X, None)):
        assert sympy.expand(quick(index, var, width) - quick.__wrapped__(index, var, width)) == 0


def test_one_process_compiles_at_a_time(tmp_path: Path) -> None:
    """And the same one more, inside. Who waited in vain compiles as well."""
    first, second = (quick_inductor._Turn(tmp_path / "lock") for _ in range(2))
    with first._taken(), first._taken(), (tmp_path / "lock").open("w") as file:
        assert not quick_inductor._is_locked(file)
        with mock.patch.object(quick_inductor, "_PATIENCE", 0.0):
            assert second.taken_by(lambda x: x + 1)(1) == 2
    with (tmp_path / "lock").open("w") as file:
        assert quick_inductor._is_locked(file)


def test_this_release_is_known() -> None:
    quick_inductor.install()
    assert hasattr(sizevars.stride_at_vec_range, "__wrapped__")
    assert cpp.stride_at_vec_range is sizevars.stride_at_vec_range
    assert {"compile_fx", "_compile_fx_inner"} <= vars(compile_fx).keys()
    assert hasattr(async_compile.AsyncCompile.cpp_pybinding, "__wrapped__")
    assert quick_inductor._COUNT.search(codecache.CppPythonBindingsCodeCache.suffix_template)
