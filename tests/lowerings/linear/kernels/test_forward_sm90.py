"""The pass over states for Hopper computes what the plain one does, whatever the length, and waits for nobody in vain."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attn_compiler.lowerings.linear import triton_launch, triton_passes
from attn_compiler.lowerings.linear.kernels import forward_sm90
from attn_compiler.lowerings.linear.triton_tensors import LinearTensors
from tests.lowerings.linear.kernels.interpreted import with_bfloat16
from tests.lowerings.linear.triton_problems import FORMS
from tests.lowerings.shared.kernels import gluon_in_torch


@pytest.mark.parametrize("name", list(FORMS))
@pytest.mark.parametrize("precision", ["exact", "fla"])
@pytest.mark.parametrize(("length", "bad", "has_first"), [(150, None, True), (64, 5, True), (260, 150, False)])
def test_as_the_plain_pass(name: str, precision: str, length: int, bad: int | None, has_first: bool) -> None:
    torch.manual_seed(0)
    is_ssd, channels = name == "ssd", (128,) if name == "channel" else ()
    form = dataclasses.replace(FORMS[name], precision=precision, out_dtype="float32" if is_ssd else "bfloat16")
    q, k, v = (torch.randn(2, length, 1, dim).bfloat16() for dim in (128, 128, 64 if is_ssd else 128))
    g, beta, skip = -torch.rand(2, length, 1, *channels), torch.rand(2, length, 1), torch.randn(1) if is_ssd else None
    if bad is not None:
        v[0, bad, 0, 3] = torch.nan
    first = torch.randn(2, 1, *((64, 128) if is_ssd else (128, 128))) if has_first else None
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "skip": skip, "first": first}
    call = LinearTensors.of("linear_chunks", given, form.text)
    call.named.update(zip(("out", "last"), triton_launch.outputs(form, q, v), strict=True))
    with with_bfloat16():
        triton_launch.chunks(call)
        triton_passes.states(call)
    wanted = [call.named[result].clone() for result in ("out", "last")]
    del call.named["pairs"]
    call = dataclasses.replace(call, on_hopper=True)
    with with_bfloat16():
        triton_launch.chunks(call)
    assert ("pairs" in call.named) != is_ssd
    numbers = {"HOW": triton_passes.switches(call), **triton_passes.edge_strides(call)}
    arguments = call.arguments(forward_sm90.state_pass_sm90, call.sizes.rows * call.sizes.blocks, **numbers)
    for result in ("out", "last"):
        call.named[result].fill_(7.0)
    tensors = {name: None if key is None else call.named[key] for name, key in arguments.tensors.items()}
    gluon_in_torch.run(forward_sm90, "state_pass_sm90", arguments.grid[:1], {**tensors, **arguments.numbers})
    for result, expected in zip(("out", "last"), wanted, strict=True):
        within = 2e-6 if result == "last" and precision == "exact" else 2e-2
        torch.testing.assert_close(call.named[result], expected, atol=within, rtol=within, equal_nan=True)
        assert bool(expected.isfinite().all()) == (bad is None)
