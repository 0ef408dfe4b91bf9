"""Parts of an attention over other keys, merged: the whole attention, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from attn_compiler.lowerings.graph_ops.lse_op import attention_with_lse, softmax_and_lse
from attn_compiler.lowerings.graph_ops.merging import as_part, merged_parts, whole_of_parts
from tests.passes.compiling import compiled

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
