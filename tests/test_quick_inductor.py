"""Kernels of a graph that are compiled as one file compute what each on its own computes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch._inductor import async_compile, codecache

from tests import quick_inductor
from tests.inductor_caches import no_graphs


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


def test_what_can_not_be_compiled_together_is_compiled_alone(
    joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick_inductor, "_joined", lambda kernels: "this is no C++")
    x = torch.randn(6, 35)
    with no_graphs():
        torch.testing.assert_close(torch.compile(_two_kernels)(x), _two_kernels(x))
    assert joined[-1] == 0


def test_this_release_is_known() -> None:
    quick_inductor.install()
    assert hasattr(async_compile.AsyncCompile.cpp_pybinding, "__wrapped__")
    assert quick_inductor._COUNT in codecache.CppPythonBindingsCodeCache.suffix_template
