"""The kernels of linear attention in Triton's interpreter: against the recurrence, in pieces, and tile by tile."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from attn_compiler.lowerings.graph_ops.linear_recurrence import definition
from attn_compiler.lowerings.linear import triton_op
from attn_compiler.lowerings.linear.kernels import tiles
from attn_compiler.lowerings.linear.kernels.pieces import join_pieces
from attn_compiler.passes.matching.linear import draws
from tests.lowerings.linear.kernels.interpreted import with_bfloat16
from tests.lowerings.linear.triton_problems import FORMS, SIZES, furthest, problem, skip_where_refused
from tests.thinned import further

pytest.importorskip("triton")


# The kernels of linear attention in Triton's interpreter.
@pytest.mark.parametrize("name", list(FORMS))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("sort", further(draws.SORTS, daily=draws.SORTS[:1]))
def test_results_states_and_gradients_are_the_recurrence(
    name: str, sizes: tuple[int, int, int, int, int], sort: str
) -> None:
    torch.manual_seed(0)
    found = furthest(FORMS[name], problem(FORMS[name], sizes, sort=sort))
    assert max(found.pop("out"), found.pop("last")) < 5e-6, found
    # By channel the gradient of g is a difference of sums that hold v. Of a single token it is the state's alone, beside values of 1e3.
    if name == "channel" and sizes[0] == 1 and sort == "unusual":
        assert found.pop("g") < 1e-3
    assert max(found.values()) < 2e-5, found


@pytest.mark.parametrize("name", ["delta", "channel"])
@pytest.mark.parametrize("decay", [0.0, 0.3, 2.0])
def test_equal_keys_are_no_trouble(name: str, decay: float) -> None:
    """Powers of the triangle of 64 such rows would be far beyond float32; so would decays that are divided by each other."""
    form = FORMS[name]
    given = dict(zip(form.roles, problem(form, (128, 1, 1, 16, 16)), strict=True))
    with torch.no_grad():
        given["k"][:], given["beta"][:], given["g"][:] = given["k"][:, :1], 1.0, -decay
    assert max(furthest(form, list(given.values())).values()) < 2e-5


# States between pieces are those of one piece after the other, forwards and backwards.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_ROWS, _PIECES, _DIM, _WIDE = 6, 3, 16, 32


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("has_edge", [False, True])
def test_pieces_are_joined_in_their_order(is_reversed: bool, has_edge: bool) -> None:
    torch.manual_seed(0)
    both = torch.randn(_ROWS, _PIECES, _DIM, _WIDE, device=DEVICE)
    edge = torch.randn(_ROWS // 2, 2, _DIM, _DIM, device=DEVICE) if has_edge else None
    between = torch.empty(_ROWS, _PIECES, _DIM, _DIM, device=DEVICE)
    strides = (0, 0, 0, 0) if edge is None else edge.stride()
    join_pieces[(_ROWS,)](
        both, both, both, edge, between, 2, 9, _PIECES, 3, *strides,
        C=16, DK=_DIM, WK=_DIM, DV=_DIM, WV=_DIM, BV=_DIM, LOCAL=_WIDE, WIDE=_WIDE, DELTA=True, REVERSED=is_reversed, PARTS=0,
    )  # fmt: skip
    state = torch.zeros(_ROWS, _DIM, _DIM, device=DEVICE) if edge is None else edge.flatten(0, 1)
    for piece in reversed(range(_PIECES)) if is_reversed else range(_PIECES):
        torch.testing.assert_close(between[:, piece], state, rtol=1e-4, atol=1e-4)
        local, whole = both[:, piece].split(_DIM, -1)
        state = (whole.mT if is_reversed else whole) @ state + local


def test_without_the_delta_rule_a_piece_decays_the_state() -> None:
    torch.manual_seed(0)
    local = torch.randn(_ROWS, _PIECES, _DIM, _DIM, device=DEVICE)
    sums = -torch.rand(_ROWS, 8, 2, 16, device=DEVICE)
    between = torch.empty(_ROWS, _PIECES, _DIM, _DIM, device=DEVICE)
    join_pieces[(_ROWS,)](
        local, None, sums, None, between, 2, 8, _PIECES, 3, 0, 0, 0, 0,
        C=16, DK=_DIM, WK=_DIM, DV=_DIM, WV=_DIM, BV=_DIM, LOCAL=_DIM, WIDE=_DIM, DELTA=False, REVERSED=False, PARTS=0,
    )  # fmt: skip
    state = torch.zeros(_ROWS, _DIM, _DIM, device=DEVICE)
    for piece in range(_PIECES):
        torch.testing.assert_close(between[:, piece], state)
        decay = sums[:, 3 * piece : 3 * piece + 3, 0, -1].sum(1).exp()
        state = state * decay[:, None, None] + local[:, piece]


# Products of parts hold the bits that they are to hold, and so does the inverse of a triangle, however alike its rows are.


@triton.jit
def _products(X, Y, Out, C: tl.constexpr, PARTS: tl.constexpr):
    at = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(Out + at, tiles.product(tl.load(X + at), tl.load(Y + at), PARTS))


@triton.jit
def _stored(X, Parts, Y, Out, Kept, C: tl.constexpr, TURNED: tl.constexpr, PARTS: tl.constexpr):
    at = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    tiles.store_parts(Parts, at, C * C, tl.load(X + at), PARTS)
    tl.store(Kept + at, tiles.load_parts(Parts, at, C * C, PARTS))
    tl.store(Out + at, tiles.stored_product(tl.load(Y + at), Parts, at, C * C, TURNED, PARTS))


@triton.jit
def _inverse(X, Scratch, Out, C: tl.constexpr, PARTS: tl.constexpr):
    at = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(Out + at, tiles.inverse(tl.load(X + at), Scratch, C, PARTS))


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
@pytest.mark.parametrize(("parts", "within"), [(0, 1e-6), (1, 6e-3), (2, 1e-5), (3, 2e-7)])
def test_what_is_stored_in_parts_is_kept_and_multiplied(turned: bool, half: bool, parts: int, within: float) -> None:
    torch.manual_seed(0)
    x, y = _made(False), _made(half)
    stored = torch.empty(max(parts, 1), 32, 32, device=DEVICE, dtype=torch.bfloat16 if parts else torch.float32)
    out, kept = torch.empty(32, 32, device=DEVICE), torch.empty(32, 32, device=DEVICE)
    with with_bfloat16():
        _stored[(1,)](x, stored, y, out, kept, 32, turned, parts)
    assert _far(kept, x.double()) < within
    assert _far(out, y.double() @ (x.mT if turned else x).double()) < within


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("kind", ["random", "equal"])
@pytest.mark.parametrize(("parts", "within"), [(0, 2e-6), (1, 2e-2), (2, 2e-5), (3, 2e-6)])
def test_the_inverse_of_a_triangle(size: int, kind: str, parts: int, within: float) -> None:
    """Of equal keys each entry is 1, and powers of the triangle reach 10^17."""
    torch.manual_seed(0)
    lower = torch.ones(size, size) if kind == "equal" else torch.randn(size, size) * 0.3
    x = lower.tril(-1).to(DEVICE)
    out = torch.empty_like(x)
    with with_bfloat16():
        _inverse[(1,)](x, torch.empty_like(x), out, size, parts)
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


# A number that is not finite changes nothing of the tokens before it; in gradients nothing that is finite in the recurrence.
_LENGTH, _FLAGGED = 90, (0, 20, 63, 64, 89)


def _finite_as(found: torch.Tensor, wanted: torch.Tensor) -> None:
    kept = wanted.isfinite()
    torch.testing.assert_close(found.double()[kept], wanted[kept], rtol=1e-3, atol=1e-4)


_DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def _short_problem(name: str, device: str) -> dict[str, torch.Tensor]:
    if device == "cuda":
        skip_where_refused()
    made = problem(FORMS[name], (_LENGTH, 1, 1, 16, 16), batch=1, device=device)
    return dict(zip(FORMS[name].roles, made, strict=True))


@pytest.mark.parametrize("name", list(FORMS))
@pytest.mark.parametrize("device", _DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_reaches_no_token_before_its_own(name: str, bad: float, device: str) -> None:
    given = {role: x.detach() for role, x in _short_problem(name, device).items()}
    for role, x in given.items():
        if x.dim() < 3 or x.shape[1] != _LENGTH:
            continue
        for token in _FLAGGED:
            spoiled = x.clone()
            spoiled[0, token].view(-1)[0] = bad
            out, _ = triton_op.run([*(given | {role: spoiled}).values()], FORMS[name].text)
            wanted, _ = definition(FORMS[name], [*(given | {role: spoiled}).values()])
            _finite_as(out[:, :token], wanted[:, :token].double())
            assert not bool(out[:, token:][~wanted[:, token:].isfinite()].isfinite().any()), (role, token)
            assert bool(out[:, :token].isfinite().all()), (role, token)


@pytest.mark.parametrize("name", list(FORMS))
@pytest.mark.parametrize("device", _DEVICES)
@pytest.mark.parametrize("of_result", [False, True])
def test_gradients_are_finite_where_those_of_the_recurrence_are(name: str, of_result: bool, device: str) -> None:
    form = FORMS[name]
    role = "x" if name == "ssd" else "v"
    for token in _FLAGGED:
        given = _short_problem(name, device)
        noise = torch.randn(1, _LENGTH, 1, 16, device=device)
        with torch.no_grad():
            (noise if of_result else given[role])[0, token, 0, 3] = torch.nan
        wide = {name: x.detach().double().requires_grad_() for name, x in given.items()}
        exact = dataclasses.replace(form, out_dtype="float64", state_dtype="float64")
        found = torch.autograd.grad(
            triton_op.run([*given.values()], form.text)[0], [*given.values()], noise, allow_unused=True
        )
        wanted = torch.autograd.grad(
            definition(exact, [*wide.values()])[0], [*wide.values()], noise.double(), allow_unused=True
        )
        for ours, theirs in zip(found, wanted, strict=True):
            _finite_as(ours, theirs)


@pytest.mark.parametrize("device", _DEVICES)
def test_strong_decays_of_channels_keep_results_exact(device: str) -> None:
    """A token's decay to its chunk's end is a small difference of sums of hundreds, whose exponentials overflow."""
    if device == "cuda":
        skip_where_refused()
    form = FORMS["channel"]
    given = dict(zip(form.roles, problem(form, (128, 1, 1, 16, 16), device=device), strict=True))
    with torch.no_grad():
        given["g"].uniform_(-10.0, -1.0)
        given["g"][:, 48:80] /= 30.0
    found = furthest(form, list(given.values()))
    assert found.pop("last") < 3.5e-7
    assert max(found.values()) < 3e-5
