"""At which sizes a function is run, and that its operands fit."""

from __future__ import annotations

import torch

from attn_compiler.passes.matching.linear import draws
from tests.lowerings.linear import linear_forms


def test_lengths_are_around_the_borders_of_chunks_and_the_real_one() -> None:
    found = list(draws.sizes(linear_forms.spec(length=700)))
    lengths = [one.length for one in found if one.sort == "tiny"]
    assert lengths == [1, 2, 63, 64, 65, 131]
    assert 700 in [one.length for one in found]
    assert {one.sort for one in found} == set(draws.SORTS)


def test_the_real_heads_and_batch_are_among_them() -> None:
    spec = linear_forms.spec(batch=3, num_heads_k=2, num_heads_v=6, head_dim_k=32, head_dim_v=48)
    *_, last = draws.sizes(spec)
    assert (last.batch, last.heads_k, last.heads_v, last.dim_k, last.dim_v) == (3, 2, 6, 32, 48)


def test_what_would_take_long_is_made_smaller() -> None:
    *_, last = draws.sizes(
        linear_forms.spec(linear_forms.CHANNEL, batch=64, num_heads_k=64, num_heads_v=64, head_dim_k=128)
    )
    assert (last.batch, last.heads_v, last.dim_k) == (1, 1, 128)


def test_many_heads_are_run_at_small_sizes_alone() -> None:
    """A state space of 128 heads of their own sizes took half a minute."""
    found = list(
        draws.sizes(linear_forms.spec(linear_forms.STATE_SPACE, num_heads_k=1, num_heads_v=128, head_dim_k=128))
    )
    assert {(one.heads_k, one.heads_v) for one in found} == {(2, 4), (1, 2), (1, 128)}
    assert [(one.length, one.dim_k, one.dim_v) for one in found if one.heads_v == 128] == [(2, 2, 3)]


def test_operands_have_the_shapes_of_their_roles() -> None:
    for form in (linear_forms.DELTA, linear_forms.CHANNEL, linear_forms.STATE_SPACE):
        spec = linear_forms.spec(form)
        for at in draws.sizes(spec):
            given = dict(zip(form.roles, draws.operands(spec, at), strict=True))
            assert all(x.dtype is torch.float64 and x.requires_grad for x in given.values())
            v = given["x" if form.recurrence == "ssd" else "v"]
            assert v.shape == (at.batch, at.length, at.heads_v, at.dim_v)
