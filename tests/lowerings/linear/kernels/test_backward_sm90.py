"""A backward's kernels for Hopper compute what the plain ones do, whatever the length, and wait for nobody in vain."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch

from attn_compiler.lowerings.linear import triton_backward, triton_launch, triton_passes
from attn_compiler.lowerings.linear.kernels import backward_sm90, forward_sm90, reverse_sm90, space_sm90
from attn_compiler.lowerings.linear.triton_tensors import LinearTensors
from tests.lowerings.linear.kernels.interpreted import with_bfloat16
from tests.lowerings.linear.triton_problems import FORMS
from tests.lowerings.shared.kernels import gluon_in_torch

_PASSES = ("states", "values", "afters", "grad_values", "grad_first")
_KERNELS = (forward_sm90, reverse_sm90, backward_sm90, space_sm90)


@pytest.mark.parametrize("precision", ["exact", "fla"])
@pytest.mark.parametrize(
    ("length", "bad", "has_first", "is_apart", "in_pieces"),
    [
        (150, None, True, False, False),
        (64, "grad", True, True, False),
        (260, "v", False, False, False),
        (300, None, True, True, True),
        (300, "v", False, False, True),
    ],
)
def test_as_the_plain_kernels(
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    length: int,
    bad: str | None,
    has_first: bool,
    is_apart: bool,
    in_pieces: bool,
) -> None:
    torch.manual_seed(0)
    form = dataclasses.replace(FORMS["delta"], precision=precision, out_dtype="bfloat16")
    width = 136 if is_apart else 128
    q, k, v, grad = (torch.randn(2, length, heads, width).bfloat16()[..., :128] for heads in (1, 1, 2, 2))
    if bad is not None:
        {"grad": grad, "v": v}[bad][0, length // 2, 0, 3] = torch.nan
    given = {"q": q, "k": k, "v": v, "g": -torch.rand(2, length, 2), "beta": torch.rand(2, length, 2)}
    if has_first:
        given["first"] = torch.randn(2, 2, 128, 128)
    grad = grad.contiguous()
    call = LinearTensors.of("linear_chunks_backward", given, form.text, grad)
    named = call.named
    named.update({f"grad_{name}": torch.empty(x.shape, dtype=x.dtype) for name, x in given.items()}, grad=grad)
    named["grad_last"] = torch.randn(2, 2, 128, 128)
    with with_bfloat16():
        triton_launch.chunks(call)
        triton_backward._states(call)
        triton_backward._chunk_gradients(call, None)
    results = [name for name in (*_PASSES, "part_q", "part_k", "grad_v", "grad_g", "grad_beta") if name in named]
    wanted = {name: named[name].clone() for name in results}
    for name in results:
        named[name].fill_(7.0)
    if in_pieces:
        for name, value in {"_SHORTEST": 1, "_FEWEST": 2, "_PROCESSORS": 1000}.items():
            monkeypatch.setattr(triton_passes, name, value)
    on_hopper = dataclasses.replace(call, on_hopper=True)
    for processors in (4, 12):
        with (
            mock.patch.object(triton_backward, "processors", return_value=processors),
            mock.patch.object(LinearTensors, "run", _run),
            with_bfloat16(),
        ):
            triton_backward._states(on_hopper)
            triton_backward._chunk_gradients(on_hopper, None)
        assert ("wholes" in named) == in_pieces
        for name, expected in wanted.items():
            found = named[name].float().sum(-3) if name in ("values", "grad_values") else named[name]
            within = (2e-5 if precision == "exact" and expected.dtype == torch.float32 else 1e-2) * _largest(expected)
            torch.testing.assert_close(found.to(expected.dtype), expected, atol=within, rtol=0.0, equal_nan=True)
    assert all(bool(x.isfinite().all()) for x in wanted.values()) == (bad is None)


def _largest(x: torch.Tensor) -> float:
    return float(x[x.isfinite()].abs().max())


_PLAIN_RUN = LinearTensors.run


def _run(call: LinearTensors, kernel: Any, programs: int, *given: int, part: str = "", **numbers: Any) -> None:
    module = {each.__name__: each for each in _KERNELS}.get(kernel.fn.__module__)
    if module is None:
        _PLAIN_RUN(call, kernel, programs, *given, part=part, **numbers)
        return
    arguments = call.arguments(kernel, programs, *given, **numbers)
    tensors = {name: None if key is None else _flat(call.named[key]) for name, key in arguments.tensors.items()}
    gluon_in_torch.run(module, kernel.fn.__name__, arguments.grid[:1], {**tensors, **arguments.numbers})


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return all from the first number of x to the last."""
    return x.as_strided((1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)),), (1,))


@pytest.mark.parametrize("precision", ["exact", "fla"])
@pytest.mark.parametrize(
    ("length", "bad", "heads", "groups", "has_first"),
    [
        (150, None, 4, 2, True),
        (64, "grad", 2, 1, False),
        (260, "v", 4, 1, True),
        (100, "beta", 4, 1, True),
        (1, None, 6, 2, False),
    ],
)
def test_the_state_space(
    precision: str, length: int, bad: str | None, heads: int, groups: int, has_first: bool
) -> None:
    """Operands are views. With one processor a program has all heads of a group; with many, 260 tokens have
    pieces."""
    torch.manual_seed(0)
    form = dataclasses.replace(FORMS["ssd"], precision=precision, out_dtype="float32")
    q, k = torch.randn(2, length, 2, groups, 128).bfloat16().unbind(2)
    v, grad = torch.randn(2, length, heads, 72).bfloat16()[..., :64], torch.randn(2, length, heads, 64)
    given = {"q": q, "k": k, "v": v, "g": -torch.rand(2, length, heads), "beta": torch.rand(2, length, heads)}
    if bad is not None:
        x = {**given, "grad": grad}[bad]
        (x[..., 3] if x.ndim == 4 else x)[0, length // 2, 0] = torch.nan
    skip = torch.randn(heads) if has_first else None
    given["first"] = torch.randn(2, heads, 64, 128) if has_first else None
    call = LinearTensors.of("linear_chunks_backward", {**given, "skip": skip}, form.text, grad)
    named = call.named
    named.update({f"grad_{name}": torch.empty_like(x) for name, x in given.items() if x is not None}, grad=grad)
    named["grad_v"], named["grad_last"] = torch.empty(v.shape, dtype=v.dtype), torch.randn(2, heads, 64, 128)
    results = ["states", "afters", "grad_v", "grad_g", "grad_beta", *(["grad_first"] if has_first else [])]

    def run(call: LinearTensors) -> dict[str, torch.Tensor]:
        triton_launch.chunks(call)
        triton_backward._states(call)
        found = {"skip": triton_backward._chunk_gradients(call, skip)}
        for name in ("q", "k"):
            part = named[f"part_{name}"]
            found[name] = part.view(2, length, groups, -1, 128).sum(3)
        found |= {name: named[name] for name in results}
        return {name: x.clone() for name, x in found.items() if x is not None}

    with with_bfloat16():
        wanted = run(call)
    for processors in (1, 48):
        for name in results:
            named[name].fill_(7.0)
        named.pop("pairs", None)
        with (
            mock.patch.object(triton_backward, "processors", return_value=processors),
            mock.patch.object(triton_passes, "processors", return_value=processors),
            mock.patch.object(triton_passes, "_SHORTEST", 1),
            mock.patch.object(LinearTensors, "run", _run),
            with_bfloat16(),
        ):
            found = run(dataclasses.replace(call, on_hopper=True))
        assert "pairs" not in named
        for name, expected in wanted.items():
            within = (2e-5 if precision == "exact" and expected.dtype == torch.float32 else 1e-2) * _largest(expected)
            if precision == "exact" and name in ("q", "k"):
                within = 1e-4 * _largest(expected)
            same = found[name].view(expected.shape).to(expected.dtype)
            torch.testing.assert_close(same, expected, atol=within, rtol=0.0, equal_nan=True)
    assert all(bool(x.isfinite().all()) for x in wanted.values()) == (bad is None)
