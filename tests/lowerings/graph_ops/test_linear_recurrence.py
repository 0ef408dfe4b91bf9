"""The recurrence itself, on numbers that are known by hand, and what functions make of their operands before it."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from attn_compiler.lowerings.graph_ops.linear_recurrence import LinearOperands, definition, prepared, token_by_token
from tests.lowerings.linear import linear_forms


def test_a_state_decays_is_written_and_is_read() -> None:
    one, half = torch.ones(1, 3, 1, 1), torch.full((1, 3, 1), 0.5).log()
    out, state = token_by_token(LinearOperands(q=one, k=one, v=one, g=half))
    assert out.flatten().tolist() == [1.0, 1.5, 1.75]
    assert state.item() == 1.75


def test_the_delta_rule_writes_what_the_state_does_not_say_yet() -> None:
    one, kept = torch.ones(1, 3, 1, 1), torch.zeros(1, 3, 1)
    beta = torch.full((1, 3, 1), 0.5)
    out, _ = token_by_token(LinearOperands(q=one, k=one, v=one, g=kept, beta=beta))
    assert out.flatten().tolist() == [0.5, 0.75, 0.875]


def test_a_decay_of_channels_is_one_of_heads_where_all_are_equal() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 5, 2, 4).unbind()
    g, beta = -torch.rand(2, 5, 2), torch.rand(2, 5, 2)
    of_heads = token_by_token(LinearOperands(q=q, k=k, v=v, g=g, beta=beta))
    of_channels = token_by_token(LinearOperands(q=q, k=k, v=v, g=g[..., None].expand(-1, -1, -1, 4), beta=beta))
    torch.testing.assert_close(of_heads, of_channels)


def test_a_given_state_is_gone_on_from() -> None:
    for form, given in linear_forms.problems(length=8, dtype=torch.float64):
        wide = dataclasses.replace(form, out_dtype="float64", state_dtype="float64")
        whole, last = definition(wide, given)
        tokens = [x.dim() > 1 and x.shape[1] == 8 for x in given]
        first = [x[:, :5] if is_one else x for x, is_one in zip(given, tokens, strict=True)]
        head, between = definition(wide, first)
        roles = (*(role for role in form.roles if role != "state"), "state")
        by_role = dict(zip(form.roles, (x[:, 5:] if t else x for x, t in zip(given, tokens, strict=True)), strict=True))
        rest = [{**by_role, "state": between}[role] for role in roles]
        tail, end = definition(dataclasses.replace(wide, roles=roles), rest)
        torch.testing.assert_close(torch.cat([head, tail], 1), whole)
        torch.testing.assert_close(end, last)


def test_dt_is_shifted_grows_and_is_clamped_before_it_counts() -> None:
    (_, _), (_, _), (form, given) = linear_forms.problems(length=4)
    by_role = dict(zip(form.roles, given, strict=True))
    narrow = prepared(dataclasses.replace(form, limits=(0.1, 0.5)), given)
    dt = F.softplus(by_role["dt"] + by_role["dt_bias"]).clamp(0.1, 0.5)
    torch.testing.assert_close(narrow.v, by_role["x"] * dt[..., None])
    torch.testing.assert_close(narrow.g, by_role["A"] * dt)


def test_heads_of_q_and_k_are_read_by_as_many_of_v_in_a_row() -> None:
    (form, given), *_ = linear_forms.problems(length=4)
    found = prepared(dataclasses.replace(form, eps=None), given)
    torch.testing.assert_close(found.k[:, :, 1], given[1][:, :, 0])
    torch.testing.assert_close(found.k[:, :, 2], given[1][:, :, 1])
