"""Linear attention by its definition, and the parts that it is computed in: chunks, heads, scans, decays, triangles."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from attn_compiler.lowerings.graph_ops.linear_recurrence import LinearOperands, definition, token_by_token
from attn_compiler.lowerings.linear import channel_pairs, scan_ops, triton_op  # noqa: F401 (ops are registered by the import)
from attn_compiler.lowerings.linear.chunks import bounded_decays, by_chunks, decay_sums
from attn_compiler.lowerings.linear.reference import LinearReference, run
from attn_compiler.reasons.codes import Code
from attn_compiler.spec.target import Target
from tests.lowerings.linear import linear_forms, linear_problems


# `linear_reference` computes what a form says, in the dtypes of the function, and is made of ops that Inductor sees.
def test_it_is_the_definition() -> None:
    for form, given in linear_forms.problems(length=90):
        out, last = run(given, form.text)
        torch.testing.assert_close((out, last), definition(form, given), rtol=1e-4, atol=1e-4)
        assert out.is_contiguous()
        assert last.is_contiguous()


def test_it_gives_the_dtypes_of_the_function() -> None:
    for form, given in linear_forms.problems(length=5):
        narrow = dataclasses.replace(form, out_dtype="bfloat16")
        out, last = run(given, narrow.text)
        assert (out.dtype, last.dtype) == (torch.bfloat16, torch.float32)


def test_the_inner_compiler_sees_its_ops() -> None:
    op = LinearReference().op
    for form, given in linear_forms.problems(length=90):
        traced = make_fx(lambda *x, text=form.text: op(list(x), text))(*given)
        called = {str(node.target) for node in traced.graph.nodes if node.op == "call_function"}
        ours = {name for name in called if name.startswith("attn_compiler.")}
        of_form = {"attn_compiler.linear_channel_pairs.default"} if form.channel else set()
        assert ours == {"attn_compiler.linear_scan.default"} | of_form


def test_it_takes_every_call() -> None:
    assert LinearReference().why_not(linear_forms.spec(), Target.fake(sm=90)) == []


# The recurrence by chunks gives what it gives token by token.
_CASES = [*itertools.product((False, True), (False, True), (1, 5, 64, 150), (False, True))]


@pytest.mark.parametrize(("channel", "delta", "length", "has_state"), _CASES)
def test_chunks_are_as_tokens(channel: bool, delta: bool, length: int, has_state: bool) -> None:
    given = linear_problems.prepared(channel=channel, delta=delta, length=length, has_state=has_state)
    outs, grads = linear_problems.furthest(
        lambda: by_chunks(given), lambda: token_by_token(given), linear_problems.operands(given)
    )
    assert outs < 1e-12
    assert grads < 1e-11


def test_a_decay_that_forgets_all_gives_no_infinity() -> None:
    given = linear_problems.prepared(channel=True, delta=True, length=80, has_state=False, dtype=torch.float32)
    strong = LinearOperands(q=given.q, k=given.k, v=given.v, g=given.g.detach() * 500, beta=given.beta)
    out, last = by_chunks(strong)
    assert bool(out.isfinite().all())
    assert bool(last.isfinite().all())
    torch.testing.assert_close((out, last), token_by_token(strong), rtol=1e-4, atol=1e-5)


# Heads of more than 256 channels are refused with their sizes.
def test_both_sizes_of_a_head_are_bounded() -> None:
    assert triton_op.check_heads(linear_forms.spec(head_dim_k=256, head_dim_v=256)) == []
    for changed in ({"head_dim_k": 257}, {"head_dim_v": 257}):
        (reason,) = triton_op.check_heads(linear_forms.spec(**changed))
        assert (reason.code, "257" in reason.observed) == (Code.HEAD_DIM, True)


# The scan over chunks.
_OPS: Any = torch.ops.attn_compiler


def _scan(*, with_w: bool, channel: bool) -> tuple[Tensor | None, ...]:
    chunks, pairs, size, dim_k, dim_v = 3, 2, 4, 5, 6
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, dtype=torch.float64) * 0.5).requires_grad_()

    u, kd = normal(chunks, pairs, size, dim_v), normal(chunks, pairs, size, dim_k)
    cd = normal(chunks, pairs, dim_k if channel else 1, 1)
    return u, kd, cd, normal(pairs, dim_k, dim_v), normal(chunks, pairs, size, dim_k) if with_w else None


@pytest.mark.parametrize("with_w", [True, False])
@pytest.mark.parametrize("channel", [True, False])
def test_the_formula_of_the_scan_is_its_gradient(with_w: bool, channel: bool) -> None:
    given = _scan(with_w=with_w, channel=channel)

    def outs(*operands: Tensor | None) -> tuple[Tensor, ...]:
        states, last, v = _OPS.linear_scan(*operands)
        return (states, last, v) if with_w else (states, last)

    assert torch.autograd.gradcheck(outs, given)


@pytest.mark.parametrize("with_w", [True, False])
def test_fakes_are_as_what_is_given(with_w: bool) -> None:
    torch.library.opcheck(_OPS.linear_scan.default, _scan(with_w=with_w, channel=True))


def test_any_strides_are_read() -> None:
    given = [None if x is None else x.detach() for x in _scan(with_w=True, channel=True)]
    turned = [None if x is None else x.mT.contiguous().mT for x in given]
    torch.testing.assert_close(_OPS.linear_scan(*turned), _OPS.linear_scan(*given))


# Sums of decays have the digits of what they are sums of.
_SIZE = 9


def _by_themselves(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `decay_sums`, each sum by itself; 0 where there is none."""
    nothing = torch.zeros_like(g[..., 0])
    size = g.shape[-1]
    rows = [[g[..., j + 1 : i + 1].sum(-1) if j <= i else nothing for j in range(size)] for i in range(size)]
    start = [g[..., : i + 1].sum(-1) for i in range(size)]
    end = [g[..., i + 1 :].sum(-1) for i in range(size)]
    between = torch.stack([torch.stack(row, -1) for row in rows], -2)
    return between, torch.stack(start, -1), torch.stack(end, -1)


def _found(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    between, start, end = decay_sums(g)
    return between.tril(), start, end


def test_they_are_the_sums_and_so_are_their_gradients() -> None:
    g = torch.randn(2, 3, _SIZE, dtype=torch.float64).requires_grad_()
    torch.testing.assert_close(_found(g), _by_themselves(g), rtol=0, atol=1e-13)
    noise = [torch.randn_like(x) for x in _found(g)]
    grads = [torch.autograd.grad(sums(g), g, noise) for sums in (_found, _by_themselves)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


def test_what_is_before_a_token_has_no_decay_to_it() -> None:
    between, _, _ = decay_sums(torch.zeros(4))
    assert (between == -torch.inf).equal(torch.ones(4, 4, dtype=torch.bool).triu(1))


def test_a_small_sum_after_a_reset_has_its_digits() -> None:
    g = -torch.rand(2, 64) * 1e-3
    g[:, 5], g[:, 11] = -float("inf"), -3e38
    low = bounded_decays(g)
    wanted = [x.float() for x in _by_themselves(low.double())]
    torch.testing.assert_close(list(_found(low)), wanted, rtol=1e-6, atol=1e-8)


def test_a_gradient_that_is_not_finite_reaches_the_decays_of_its_sum_alone() -> None:
    for which, sums in enumerate(_found(torch.zeros(_SIZE))):
        for at in torch.ones_like(sums).nonzero().tolist():
            noise = torch.zeros_like(sums)
            noise[tuple(at)] = 1.0
            g, other = (torch.zeros(_SIZE).requires_grad_() for _ in range(2))
            expected = torch.autograd.grad(_by_themselves(other)[which], other, noise)[0]
            found = torch.autograd.grad(_found(g)[which], g, noise.masked_fill(noise != 0, torch.nan))[0]
            assert found.isnan().equal(expected != 0), (which, at)


def test_a_decay_that_is_not_a_number_stays_one() -> None:
    low = bounded_decays(torch.tensor([torch.nan, -torch.inf, torch.inf, -3.0]))
    assert low.isnan().tolist() == [True, False, False, False]
    assert low[1:3].exp().tolist() == [0.0, torch.inf]
    assert low[3] == -3.0


# Products of two tokens with a decay for each channel.
def _given(size: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    rows, y = torch.randn(2, 3, size, 2, 5, dtype=dtype), torch.randn(2, 3, size, 5, dtype=dtype)
    return rows.requires_grad_(), y.requires_grad_(), (-torch.rand(2, 3, size, 5, dtype=dtype)).requires_grad_()


def _pair_by_pair(rows: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    size = g.shape[2]
    start = torch.stack([g[:, :, : i + 1].sum(2) for i in range(size)], 2)
    end = torch.stack([g[:, :, i + 1 :].sum(2) for i in range(size)], 2)
    nothing = torch.zeros_like(rows[:, :, 0, :, 0])

    def pair(i: int, j: int) -> Tensor:
        return (rows[:, :, i] * (y[:, :, j] * g[:, :, j + 1 : i + 1].sum(2).exp()).unsqueeze(2)).sum(-1)

    pairs = [[pair(i, j) if j <= i else nothing for j in range(size)] for i in range(size)]
    return torch.stack([torch.stack(row, -1) for row in pairs], 2), start, end


@pytest.mark.parametrize("size", [1, 2, 16])
def test_they_are_what_they_are_pair_by_pair(size: int) -> None:
    given = _given(size)
    found, wanted = _OPS.linear_channel_pairs(*given), _pair_by_pair(*given)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    noise = [torch.randn_like(x) for x in wanted]
    grads = [torch.autograd.grad(outs, given, noise) for outs in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-11)


def test_a_small_decay_after_a_large_one_has_its_digits() -> None:
    rows, y, g = (x.detach() for x in _given(16, torch.float32))
    g = g * 1e-3
    g[:, :, 5], g[:, :, 9] = -1000.0, -160.0
    wanted = _pair_by_pair(rows.double(), y.double(), g.double())
    torch.testing.assert_close(_OPS.linear_channel_pairs(rows, y, g)[0], wanted[0].float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_is_not_finite_stays_where_it_is(which: int) -> None:
    """In results and in gradients, which are finite where they are so pair by pair."""
    for token in range(8):
        given = [x.detach() for x in _given(8)]
        given[which][0, 1, token, ..., 2] = torch.nan
        leaves = [x.requires_grad_() for x in given]
        found, wanted = _OPS.linear_channel_pairs(*leaves)[0], _pair_by_pair(*leaves)[0]
        noise = torch.ones_like(found)
        ours, theirs = (torch.autograd.grad(x, leaves, noise) for x in (found, wanted))
        for one, other in zip((found, *ours), (wanted, *theirs), strict=True):
            kept = other.isfinite()
            assert bool(one[kept].isfinite().all()), token
            torch.testing.assert_close(one[kept], other[kept])
        assert found.isfinite().equal(wanted.isfinite())


def test_fakes_and_strides() -> None:
    given = [x.detach() for x in _given(4)]
    torch.library.opcheck(_OPS.linear_channel_pairs.default, tuple(x.requires_grad_() for x in given))
    turned = [x.detach().mT.contiguous().mT for x in given]
    torch.testing.assert_close(_OPS.linear_channel_pairs(*turned), _OPS.linear_channel_pairs(*given))
