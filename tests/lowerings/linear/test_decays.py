"""Sums of decays have the digits of what they are sums of; gradients of them are sums, too."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_compiler.lowerings.linear import decays

_SIZE = 9


def _by_themselves(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `decays.sums`, each sum by itself; 0 where there is none."""
    nothing = torch.zeros_like(g[..., 0])
    size = g.shape[-1]
    rows = [[g[..., j + 1 : i + 1].sum(-1) if j <= i else nothing for j in range(size)] for i in range(size)]
    start = [g[..., : i + 1].sum(-1) for i in range(size)]
    end = [g[..., i + 1 :].sum(-1) for i in range(size)]
    between = torch.stack([torch.stack(row, -1) for row in rows], -2)
    return between, torch.stack(start, -1), torch.stack(end, -1)


def _found(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    between, start, end = decays.sums(g)
    return between.tril(), start, end


def test_they_are_the_sums_and_so_are_their_gradients() -> None:
    g = torch.randn(2, 3, _SIZE, dtype=torch.float64).requires_grad_()
    torch.testing.assert_close(_found(g), _by_themselves(g), rtol=0, atol=1e-13)
    noise = [torch.randn_like(x) for x in _found(g)]
    grads = [torch.autograd.grad(sums(g), g, noise) for sums in (_found, _by_themselves)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


def test_what_is_before_a_token_has_no_decay_to_it() -> None:
    between, _, _ = decays.sums(torch.zeros(4))
    assert (between == -torch.inf).equal(torch.ones(4, 4, dtype=torch.bool).triu(1))


def test_a_small_sum_after_a_reset_has_its_digits() -> None:
    g = -torch.rand(2, 64) * 1e-3
    g[:, 5], g[:, 11] = -float("inf"), -3e38
    low = decays.bounded(g)
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
    low = decays.bounded(torch.tensor([torch.nan, -torch.inf, torch.inf, -3.0]))
    assert low.isnan().tolist() == [True, False, False, False]
    assert low[1:3].exp().tolist() == [0.0, torch.inf]
    assert low[3] == -3.0
