"""A backward's kernels for Hopper compute what the plain ones do, whatever the length, and wait for nobody in vain."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from attn_compiler.lowerings.linear import triton_backward, triton_launch, triton_passes
from attn_compiler.lowerings.linear.kernels import backward_sm90, forward_sm90, reverse_sm90
from attn_compiler.lowerings.linear.triton_tensors import LinearTensors
from tests.lowerings.linear.kernels.interpreted import with_bfloat16
from tests.lowerings.linear.triton_problems import FORMS
from tests.lowerings.shared.kernels import gluon_in_torch

_PASSES = ("states", "values", "afters", "grad_values", "grad_first")
_KERNELS = (forward_sm90, reverse_sm90, backward_sm90)


@pytest.mark.parametrize("precision", ["exact", "fla"])
@pytest.mark.parametrize(("length", "bad"), [(150, None), (64, "grad"), (260, "v")])
def test_as_the_plain_kernels(precision: str, length: int, bad: str | None) -> None:
    torch.manual_seed(0)
    form = dataclasses.replace(FORMS["delta"], precision=precision, out_dtype="bfloat16")
    q, k, v, grad = (torch.randn(2, length, heads, 128).bfloat16() for heads in (1, 1, 2, 2))
    if bad is not None:
        {"grad": grad, "v": v}[bad][0, length // 2, 0, 3] = torch.nan
    given = {"q": q, "k": k, "v": v, "g": -torch.rand(2, length, 2), "beta": torch.rand(2, length, 2)}
    given["first"] = torch.randn(2, 2, 128, 128)
    call = LinearTensors.of("linear_chunks_backward", given, form.text)
    named = call.named
    named.update({f"grad_{name}": torch.empty_like(x) for name, x in given.items()}, grad=grad)
    named["grad_last"] = torch.randn(2, 2, 128, 128)
    with with_bfloat16():
        triton_launch.chunks(call)
        triton_backward._states(call)
        triton_backward._chunk_gradients(call, None)
    results = (*_PASSES, "part_q", "part_k", "grad_v", "grad_g", "grad_beta")
    wanted = {name: named[name].clone() for name in results}
    for name in results:
        named[name].fill_(7.0)
    for processors in (4, 12):
        with (
            mock.patch.object(triton_backward, "processors", return_value=processors),
            mock.patch.object(LinearTensors, "run", _run),
            mock.patch.object(triton_passes, "_has_wgmma", return_value=True),
        ):
            triton_backward._states(call)
            triton_backward._chunk_gradients(call, None)
        for name, expected in wanted.items():
            found = named[name].float().sum(-3) if name in ("values", "grad_values") else named[name]
            within = (2e-5 if precision == "exact" and expected.dtype == torch.float32 else 1e-2) * _largest(expected)
            torch.testing.assert_close(found.to(expected.dtype), expected, atol=within, rtol=0.0, equal_nan=True)
    assert all(bool(x.isfinite().all()) for x in wanted.values()) == (bad is None)


def _largest(x: torch.Tensor) -> float:
    return float(x[x.isfinite()].abs().max())


def _run(call: LinearTensors, kernel: Any, programs: int, warps: int = 4, *, part: str = "", **numbers: Any) -> None:
    module: ModuleType = {each.__name__: each for each in _KERNELS}[kernel.fn.__module__]
    arguments = call.arguments(kernel, programs, warps, **numbers)
    tensors = {name: None if key is None else call.named[key] for name, key in arguments.tensors.items()}
    gluon_in_torch.run(module, kernel.fn.__name__, arguments.grid[:1], {**tensors, **arguments.numbers})
