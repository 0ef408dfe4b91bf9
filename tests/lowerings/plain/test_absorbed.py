"""Attention over the latent, as plain nodes: what it refuses, and that it gives what the model gives."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attn_compiler.lowerings import by_name
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target
from tests.lowerings.decode.test_latent import latent_attention, latent_inputs, latent_spec
from tests.passes.compiling import compiled

CPU = Target.current("cpu")


def refused(spec: AttentionSpec) -> str:
    return "; ".join(map(str, by_name("absorbed").why_not(spec, CPU)))


def test_it_runs_everywhere_and_reads_neither_k_nor_v() -> None:
    absorbed = by_name("absorbed")
    assert absorbed.unavailable(CPU) == absorbed.unavailable(Target.fake()) == []
    assert absorbed.cannot_package() == []
    spec = latent_spec()
    assert refused(spec) == ""
    broken = dataclasses.replace(spec.k, strides=(1, 1, 1, 2))
    assert absorbed.demand(spec).broken_by(broken) is None


def test_what_is_refused() -> None:
    assert "k and v are linear maps of one latent" in refused(dataclasses.replace(latent_spec(), latent=None))
    assert "no gradient is needed" in refused(latent_spec(needs_grad=True))
    # So many queries that to make k and v once costs less.
    assert "queries" in refused(latent_spec(queries=1024))


@pytest.mark.in_turns
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_site(queries: int, dtype: torch.dtype) -> None:
    inputs = latent_inputs(queries, dtype)
    function = compiled(latent_attention, lowering="absorbed", verify=True)
    with torch.no_grad():
        found, expected = function(*inputs), latent_attention(*inputs)
    close = {"atol": 2e-6, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 1e-12, "rtol": 1e-12}
    torch.testing.assert_close(found, expected, **close)
    assert function.site.decision.lowering == "absorbed"
    assert not {"linear", "scaled_dot_product_attention"} & set(function.calls)


def test_keys_that_no_query_sees_may_hold_anything() -> None:
    inputs = latent_inputs(1)
    with torch.no_grad():
        expected = latent_attention(*inputs)
        for x in inputs[1:3]:
            x[:, :, 60:] = torch.nan
        found = compiled(latent_attention, lowering="absorbed")(*inputs)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-4)


def test_half_precision_is_float32_inside() -> None:
    inputs = latent_inputs(1, torch.float16)
    with torch.no_grad():
        found = compiled(latent_attention, lowering="absorbed")(*inputs)
        exact = latent_attention(*(x.double() if x.is_floating_point() else x for x in inputs))
        own = (latent_attention(*inputs).double() - exact).norm()
    assert found.dtype == torch.float16
    assert (found.double() - exact).norm() <= own
