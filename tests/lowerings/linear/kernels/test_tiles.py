"""Products of parts hold the bits that they are to hold, and so does the inverse of a triangle, however alike its rows are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from attn_compiler.lowerings.linear.kernels import tiles
from tests.lowerings.linear.kernels.interpreted import with_bfloat16

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _products(X, Y, Out, C: tl.constexpr, PARTS: tl.constexpr):
    at = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(Out + at, tiles.product(tl.load(X + at), tl.load(Y + at), PARTS))


@triton.jit
def _stored(X, Parts, Y, Out, Kept, C: tl.constexpr, TURNED: tl.constexpr, PARTS: tl.constexpr):
    at = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    tiles.store_parts(Parts, at, C * C, tl.load(X + at), PARTS)
    tl.store(Kept + at, tiles.load_parts(Parts, at, C * C, PARTS))
    tl.store(Out + at, tiles.stored_product(Parts, at, C * C, tl.load(Y + at), TURNED, PARTS))


@triton.jit
def _inverse(X, Out, C: tl.constexpr, PARTS: tl.constexpr):
    at = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(Out + at, tiles.inverse(tl.load(X + at), C, PARTS))


def _made(half: bool) -> torch.Tensor:
    x = torch.randn(32, 32, device=DEVICE)
    return x.bfloat16() if half else x


@triton.jit
def _sums(G, Pairs, Ends, C: tl.constexpr):
    i = tl.arange(0, C)
    c, less = tiles.exact_sums(tl.load(G + i))
    tl.store(Pairs + i[:, None] * C + i[None, :], tiles.pairs_of(c, less))
    tl.store(Ends + i, c)
    tl.store(Ends + C + i, less)
    _, _, rest = tiles.sums_of(Ends, i, C)
    tl.store(Ends + 2 * C + i, rest)


def _far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("halves", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize(("parts", "within"), [(0, 1e-6), (2, 1e-5), (3, 2e-7)])
def test_a_product_holds_16_bits_or_24(halves: tuple[bool, bool], parts: int, within: float) -> None:
    torch.manual_seed(0)
    x, y = (_made(half) for half in halves)
    out = torch.empty(32, 32, device=DEVICE)
    with with_bfloat16():
        _products[(1,)](x, y, out, 32, parts)
    assert _far(out, x.double() @ y.double()) < within
    if halves != (True, True):
        assert _far(x.bfloat16().double() @ y.bfloat16().double(), x.double() @ y.double()) > 100 * within


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("parts", "within"), [(0, 1e-6), (2, 1e-5), (3, 2e-7)])
def test_what_is_stored_in_parts_is_kept_and_multiplied(turned: bool, half: bool, parts: int, within: float) -> None:
    torch.manual_seed(0)
    x, y = _made(False), _made(half)
    stored = torch.empty(max(parts, 1), 32, 32, device=DEVICE, dtype=torch.bfloat16 if parts else torch.float32)
    out, kept = torch.empty(32, 32, device=DEVICE), torch.empty(32, 32, device=DEVICE)
    with with_bfloat16():
        _stored[(1,)](x, stored, y, out, kept, 32, turned, parts)
    assert _far(kept, x.double()) < within
    assert _far(out, (x.mT if turned else x).double() @ y.double()) < within


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("kind", ["random", "equal"])
@pytest.mark.parametrize(("parts", "within"), [(0, 2e-6), (2, 2e-5), (3, 2e-6)])
def test_the_inverse_of_a_triangle(size: int, kind: str, parts: int, within: float) -> None:
    """Of equal keys each entry is 1, and powers of the triangle reach 10^17."""
    torch.manual_seed(0)
    lower = torch.ones(size, size) if kind == "equal" else torch.randn(size, size) * 0.3
    x = lower.tril(-1).to(DEVICE)
    out = torch.empty_like(x)
    with with_bfloat16():
        _inverse[(1,)](x, out, size, parts)
    wanted: Any = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + x.double().cpu())
    assert _far(out.cpu(), wanted) < within


def test_differences_of_large_sums_are_exact() -> None:
    """Between neighbours lies one number, however large the sums up to them are."""
    torch.manual_seed(0)
    g = -torch.rand(64, device=DEVICE) * 1e-3
    g[0] = -1e4
    pairs, ends = torch.empty(64, 64, device=DEVICE), torch.empty(3, 64, device=DEVICE)
    _sums[(1,)](g, pairs, ends, 64)
    wide = g.double().cumsum(0)
    wanted = wide[:, None] - wide[None, :]
    assert float(((pairs.double() - wanted) / (wanted.abs() + 1e-30)).abs().max()) < 1e-5
    assert _far(ends[2], wide[-1] - wide) < 1e-6
    single = g.cumsum(0)
    assert _far((single[1:] - single[:-1]), g[1:].double()) > 1e-2
