"""Parts of an attention are merged by their logsumexp; linear attention has an op of its own."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor

from attn_compiler.lowerings.graph_ops.linear_recurrence import LinearOperands, definition, prepared, token_by_token
from attn_compiler.lowerings.graph_ops.lse_op import attention_with_lse, softmax_and_lse
from attn_compiler.lowerings.graph_ops.merging import as_part, merged_parts, whole_of_parts
from tests.lowerings.linear import linear_forms
from tests.passes.compiling import compiled

# Parts of an attention over other keys, merged.
SCALE = 0.4


def merged(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cuts: list[int], sinks: Tensor | None = None) -> Tensor:
    """In parts of the keys, as passes write it."""
    acc = lse = None
    start = 0
    for end in (*cuts, k.shape[2]):
        own = slice(start, end)
        out, part = attention_with_lse(q, k[:, :, own], v[:, :, own], mask[..., own], scale=SCALE, is_part=True)
        if acc is None or lse is None:
            acc, lse = out.to(torch.promote_types(out.dtype, torch.float32)), part
        else:
            acc, lse = merged_parts(acc, lse, out, part)
        start = end
    assert acc is not None
    return whole_of_parts(acc, lse, sinks, q.dtype)


def whole(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None = None) -> Tensor:
    """In one softmax, by autograd."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.where(mask, q @ k.mT * SCALE, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), -1)
    return softmax_and_lse(scores)[0][..., : k.shape[2]] @ v


def tensors(seed: int, heads: int, heads_kv: int, queries: int, keys: int) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, heads, queries, 4), (2, heads_kv, keys, 4), (2, heads_kv, keys, 6), (heads,))
    found = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    return found, torch.rand((2, heads, queries, keys), generator=generator) < 0.5


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**20),
    st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    st.integers(1, 5),
    st.integers(2, 9).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.integers(1, n - 1), max_size=4, unique=True))
    ),
    st.booleans(),
    st.booleans(),
)
def test_any_parts_give_the_whole(
    seed: int, heads: tuple[int, int], queries: int, cut: tuple[int, list[int]], sunk: bool, empty: bool
) -> None:
    keys, cuts = cut
    (q, k, v, sinks), mask = tensors(seed, *heads, queries, keys)
    if empty:
        # A query without keys in one part, and one without any.
        mask[:, :, 0, : min(cuts, default=1)] = False
        mask[:, :, -1] = False
    leaves = [q, k, v, *([sinks] if sunk else [])]
    given_sinks = sinks if sunk else None
    got, wanted = merged(q, k, v, mask, sorted(cuts), given_sinks), whole(q, k, v, mask, given_sinks)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)
    upstream = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    grads = (torch.autograd.grad(x, leaves, upstream) for x in (got, wanted))
    for mine, right in zip(*grads, strict=True):
        assert torch.isfinite(mine).all()
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-12)


@pytest.mark.in_turns
@pytest.mark.parametrize("lowering", ["math", "reference", "untouched"])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_compiled_parts_give_the_whole(lowering: str, inner: str) -> None:
    (q, k, v, sinks), mask = tensors(0, 4, 2, 6, 12)
    mask[0, :, 2, :7] = False
    mask[1, :, 3] = False
    run = compiled(lambda *x: merged(*x[:4], [3, 7], x[4]), lowering=lowering, inner=inner)
    got, wanted = run(q, k, v, mask, sinks), whole(q, k, v, mask, sinks)
    assert {site.spec.lse for site in run.report.sites} == {"merged"}
    assert {site.decision.lowering for site in run.report.sites} == {lowering}
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)
    for mine, right in zip(*(torch.autograd.grad((x**3).sum(), (q, k, v, sinks)) for x in (got, wanted)), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-6), (torch.float16, 5e-3)])
def test_our_kernels_differentiate_parts_without_their_outputs(dtype: torch.dtype, bound: float) -> None:
    """Rows of grad_out that are large where a part's weight is small, as a long sequence has them."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, n, s, 16, generator=generator).to(dtype).requires_grad_() for n, s in ((4, 24), (2, 40), (2, 40))
    )
    mask = torch.rand(1, 1, 24, 40, generator=generator) < 0.7
    mask[:, :, :9, 16:32] = False
    mask[:, :, 20] = False
    run = compiled(lambda q, k, v, m: merged(q, k, v, m, [16, 32]), lowering="triton", inner="aot_eager")
    got = run(q, k, v, mask)
    assert {site.decision.lowering for site in run.report.sites} == {"triton"}
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted = whole(*exact, mask)
    assert float((got.detach().double() - wanted.detach()).abs().max()) < bound
    found = torch.autograd.grad(got.float().square().sum(), (q, k, v))
    right = torch.autograd.grad(wanted.square().sum(), exact)
    for mine, one in zip(found, right, strict=True):
        assert torch.isfinite(mine).all()
        assert float((mine.double() - one).norm() / one.norm()) < 4 * bound


def test_what_is_kept_of_parts_is_no_output_of_theirs() -> None:
    kept: list[Tensor] = []
    acc, lse = torch.randn(2, 2, 5, 6, requires_grad=True), torch.randn(2, 2, 5, requires_grad=True)
    out, part = torch.randn(2, 2, 5, 6, requires_grad=True), torch.randn(2, 2, 5, requires_grad=True)

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        merged_parts(acc, lse, out, part)
    assert {x.shape for x in kept} == {(2, 2, 5)}


def test_a_part_that_is_differentiated_by_nodes_gets_the_gradient_of_its_lse() -> None:
    out, lse = torch.randn(1, 2, 3, 4, requires_grad=True), torch.randn(1, 2, 3, requires_grad=True)
    grad, minus_delta = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3)
    of_out, of_lse = torch.autograd.grad(as_part(out, lse), (out, lse), (grad, minus_delta))
    assert of_out.equal(grad)
    torch.testing.assert_close(of_lse, minus_delta + (grad * out).sum(-1))


def test_parts_of_equal_values_are_that_value_however_large_their_scores_are() -> None:
    acc = torch.full((1, 1, 3, 2), 0.7)
    lse = torch.tensor([[[1e6, -1e6, 3e38]]])
    for other in (lse, lse * 0.999, torch.full_like(lse, -math.inf)):
        merged, total = merged_parts(acc, lse, acc, other)
        torch.testing.assert_close(merged, acc, rtol=2e-7, atol=0)
        assert torch.isfinite(total).all()


@pytest.mark.parametrize("lowering", ["math", "triton"])
def test_keys_that_nobody_sees_may_hold_anything(lowering: str) -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, n, s, 16, generator=generator) for n, s in ((4, 20), (2, 48), (2, 48)))
    seen = torch.rand(2, 1, 1, 48, generator=generator) < 0.6
    # A part of which nobody sees anything, and a batch row of which nobody sees anything.
    seen[:, ..., 16:32] = seen[1] = False
    k, v = (x.masked_fill(~seen.mT, bad).requires_grad_() for x, bad in ((k, math.nan), (v, math.inf)))
    run = compiled(lambda q, k, v, m: merged(q, k, v, m, [16, 32]), lowering=lowering)
    out = run(q.requires_grad_(), k, v, seen.expand(-1, 4, 20, -1))
    assert {site.decision.lowering for site in run.report.sites} == {lowering}
    assert (out[1] == 0).all()
    clean = [x.detach().nan_to_num(0.0, 0.0, 0.0).double().requires_grad_() for x in (q, k, v)]
    wanted = whole(*clean, seen.expand(-1, 4, 20, -1))
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=2e-6)
    grads = torch.autograd.grad((out**3).sum(), (q, k, v)), torch.autograd.grad((wanted**3).sum(), clean)
    for mine, right in zip(*grads, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-5)


def test_dtypes() -> None:
    acc, lse = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3)
    assert whole_of_parts(acc, lse, None, torch.float32).data_ptr() != acc.data_ptr()
    assert whole_of_parts(acc, lse, torch.randn(2).half(), torch.bfloat16).dtype == torch.bfloat16
    assert merged_parts(acc, lse, acc.bfloat16(), lse)[0].dtype == torch.float32


# The op that passes write where a logsumexp is read, run as it is.
NOTHING = -torch.inf


def test_without_a_mask_it_is_sdpa_and_a_logsumexp() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, s, 8, dtype=torch.float64) for n, s in ((4, 5), (2, 7), (2, 7)))
    out, lse = attention_with_lse(q, k, v, scale=0.3)
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(lse, torch.logsumexp(q @ k.repeat_interleave(2, 1).mT * 0.3, -1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_of_the_outputs(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 1, 2, 4, 8).to(dtype)
    out, lse = attention_with_lse(q, k, v, None, True, scale=0.5, softcap=2.0)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_a_row_of_nothing_has_no_part_in_any_gradient() -> None:
    scores = torch.tensor([[NOTHING, NOTHING], [0.0, NOTHING], [1e5, 1e5]], dtype=torch.float64, requires_grad=True)
    weights, lse = softmax_and_lse(scores)
    assert weights.tolist() == [[0.0, 0.0], [1.0, 0.0], [0.5, 0.5]]
    assert lse.tolist()[:2] == [NOTHING, 0.0]
    (weights.square().sum() + torch.exp(lse - 1e5).sum()).backward()
    assert scores.grad is not None
    assert torch.isfinite(scores.grad).all()
    assert (scores.grad[0] == 0).all()


def test_its_gradients_are_those_of_differences() -> None:
    torch.manual_seed(1)
    tensors = [torch.randn(1, n, s, 4, dtype=torch.float64, requires_grad=True) for n, s in ((2, 3), (1, 5), (1, 5))]
    mask = torch.rand(3, 5) < 0.6
    mask[0] = True

    def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attention_with_lse(q, k, v, mask, scale=0.4, softcap=1.0)
        return out, torch.exp(lse)

    assert torch.autograd.gradcheck(both, tensors)


# The recurrence itself, on numbers that are known by hand, and what functions make of their operands before it.
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
    for form, inputs in linear_forms.problems(length=8, dtype=torch.float64):
        wide = dataclasses.replace(form, out_dtype="float64", state_dtype="float64")
        whole, last = definition(wide, inputs)
        tokens = [x.dim() > 1 and x.shape[1] == 8 for x in inputs]
        first = [x[:, :5] if is_one else x for x, is_one in zip(inputs, tokens, strict=True)]
        head, between = definition(wide, first)
        roles = (*(role for role in form.roles if role != "state"), "state")
        by_role = dict(
            zip(form.roles, (x[:, 5:] if t else x for x, t in zip(inputs, tokens, strict=True)), strict=True)
        )
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
