"""A function called by roles, with the numbers of its form, and the dtypes that it gives."""

from __future__ import annotations

import dataclasses

import torch

from attn_compiler.lowerings.graph_ops.linear_recurrence import definition
from attn_compiler.passes.matching.linear import draws, running, substitutes
from attn_compiler.passes.matching.linear.running import Proposed
from attn_compiler.spec.linear import LinearForm
from tests.lowerings.linear import linear_forms
from tests.near_miss import linear_variants

_NUMBERS = {"chunk_size": 16, "use_qk_l2norm_in_kernel": True, "dt_softplus": True, "dt_limit": (0.0, 9.0)}


def _form(name: str, roles: tuple[str, ...]) -> tuple[Proposed, LinearForm]:
    proposed = substitutes.proposal(linear_variants.own(name))
    assert proposed is not None
    return proposed, running.form_of(proposed, roles, _NUMBERS, channel=False)


def test_a_function_is_given_its_operands_its_numbers_and_its_flags() -> None:
    proposed, form = _form("torch_chunk_gated_delta_rule", ("q", "k", "v", "g", "beta"))
    assert (form.chunk, form.eps, form.limits) == (16, running.EPS, None)
    spec = linear_forms.spec(form)
    given = [x.detach().float() for x in draws.operands(spec, next(iter(draws.sizes(spec))))]
    torch.testing.assert_close(proposed.run(form, given), definition(form, given), rtol=1e-4, atol=1e-5)


def test_a_function_of_one_token_writes_to_a_copy_of_the_state() -> None:
    proposed, form = _form("mamba2_selective_state_update", ("x", "dt", "A", "B", "C", "D", "dt_bias", "state"))
    spec = linear_forms.spec(form, length=1)
    (at, *_) = draws.sizes(spec)
    given = [x.detach().float() for x in draws.operands(spec, at)]
    before = given[-1].clone()
    torch.testing.assert_close(proposed.run(form, given), definition(form, given), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(given[-1], before)


def test_dtypes_are_those_that_the_function_gives() -> None:
    proposed, form = _form("torch_chunk_gated_delta_rule", ("q", "k", "v", "g", "beta"))
    half = dict.fromkeys(form.roles, torch.bfloat16)
    assert running.dtypes_of(proposed, form, half, grouped=True) == ("bfloat16", "float32")
    proposed, form = _form("mamba2_chunk_scan", ("x", "dt", "A", "B", "C"))
    assert running.dtypes_of(proposed, form, dict.fromkeys(form.roles, torch.bfloat16), grouped=False) == (
        "float32",
        "float32",
    )


def test_what_a_function_raises_is_told() -> None:
    proposed, form = _form("torch_chunk_gated_delta_rule", ("q", "k", "v", "g", "beta"))

    def raises(**_: object) -> None:
        raise RuntimeError("no such kernel")

    broken = dataclasses.replace(proposed, own=raises)
    assert "no such kernel" in running.dtypes_of(broken, form, dict.fromkeys(form.roles, torch.float32), grouped=False)
