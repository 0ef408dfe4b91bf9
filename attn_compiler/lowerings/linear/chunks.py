"""The recurrence by chunks, in plain ops whose number does not depend on the length: all chunks at once, except one scan.

Within a chunk, the decay from token j to a later token i is exp of the sum of g after j and up to i. It is at most 1 where g is at
most 0. With the delta rule the values of a chunk solve a triangular system (the WY form of products of Householder matrices: Yang et al.,
"Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024).

Sums of decays are each made of their own terms: a difference of two large sums would lose a small one's digits. A reset is a decay of -inf,
and the difference of two sums up to it is NaN. So a decay is bounded where exp of it is 0 in its dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.lowerings.graph_ops.linear_recurrence import LinearOperands
from attn_compiler.lowerings.linear import channel_pairs, scan_ops, triangles  # noqa: F401 (the ops are registered by the import)
from attn_compiler.torch_private.op_library import NAMESPACE

#: tokens of a chunk, a power of 2
CHUNK = 64
#: exp of it is 0 in float32; in float64
_LOWEST, _LOWEST_WIDE = -128.0, -1000.0
#: whole numbers of this size have sums without rounding in float32, over a chunk
_STEP = 2.0**-8

_OPS: Any = getattr(torch.ops, NAMESPACE)


def by_chunks(given: LinearOperands) -> tuple[Tensor, Tensor]:
    """Return o (B, S, H, V), and the state after the last token, as `token_by_token`."""
    batch, length, heads, dim_v = given.v.shape
    if isinstance(length, int) and length == 1:
        return one_token(given)
    q, k, v, g = (_in_chunks(x) for x in (given.q, given.k, given.v, bounded_decays(given.g)))
    beta = None if given.beta is None else _in_chunks(given.beta).unsqueeze(-1)
    rows = torch.stack([q] if beta is None else [q, k * beta], 3)
    if g.dim() == k.dim():
        found, start, end = _OPS.linear_channel_pairs.default(rows, k, g)
        pairs, *lower = found.unbind(3)
    else:
        # Before the sums: all ops between two products or sums become one kernel, whose compilation takes a second on a CPU.
        dots = _dots(rows, k)
        between, start, end = decay_sums(g)
        pairs, *lower = ((each * between.exp()).tril() for each in dots.unbind(3))
        start, end = start.unsqueeze(-1), end.unsqueeze(-1)
    grown = start.exp()
    w: Tensor | None = None
    if beta is not None:
        solved = _solve(lower[0], torch.cat([v * beta, rows[:, :, :, 1] * grown], -1))
        v, w = solved[..., :dim_v], solved[..., dim_v:]
    kd, cd = k * end.exp(), grown[..., -1, :, None]
    if isinstance(length, int) and length <= CHUNK:
        out, last = _one_chunk(given, q * grown, v, w, kd, cd, pairs)
    else:
        state = given.first_state.flatten(0, 1)
        states, last, seen = _OPS.linear_scan.default(v, kd, cd, state, w)
        of_chunk = _pair_product(pairs, v if w is None else seen)
        out = torch.baddbmm(_flat(of_chunk), _flat(q * grown), _flat(states))
    return _from_chunks(out.view(*v.shape), batch, length, heads), last.view(batch, heads, *last.shape[1:])


def one_token(given: LinearOperands) -> tuple[Tensor, Tensor]:
    """Compute one token in ops that fuse."""
    q, k, v = (x[:, 0] for x in (given.q, given.k, given.v))
    decay = given.g[:, 0].exp() if given.g.dim() == 4 else given.g[:, 0].exp().unsqueeze(-1)
    state = given.first_state * decay.unsqueeze(-1)
    if given.beta is not None:
        v = given.beta[:, 0].unsqueeze(-1) * (v - (state * k.unsqueeze(-1)).sum(-2))
    state = state + k.unsqueeze(-1) * v.unsqueeze(-2)
    return (state * q.unsqueeze(-1)).sum(-2).unsqueeze(1), state


def _one_chunk(
    given: LinearOperands, q: Tensor, v: Tensor, w: Tensor | None, kd: Tensor, cd: Tensor, pairs: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute a single chunk, without a scan. q: with the decay from the chunk's first token. Without a state, none is read."""
    if given.state is None:
        return _flat(_pair_product(pairs, v)), _flat(kd.mT @ v)
    state = given.state.flatten(0, 1).unsqueeze(0)
    seen = v if w is None else v - w @ state
    return _flat(_pair_product(pairs, seen) + q @ state), _flat(state * cd + kd.mT @ seen)


def _dots(rows: Tensor, k: Tensor) -> Tensor:
    """Multiply rows (N, P, C, X, K) by k (N, P, C, K): (N, P, C, X, C). Plain ops cost the host less, and serve where nothing is
    differentiated."""
    flat = rows.flatten(2, 3)
    found: Tensor = _OPS.linear_dots.default(flat, k) if _is_differentiated(rows, k) else flat @ k.mT
    return found.view(*rows.shape[:4], k.shape[2])


def _solve(lower: Tensor, right: Tensor) -> Tensor:
    """Solve the triangular system, with ops chosen as in `_dots`. On a CPU PyTorch's own op goes row by row."""
    if lower.device.type == "cpu" and not _is_differentiated(lower, right):
        solved: Tensor = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
        return solved
    found: Tensor = _OPS.linear_solve.default(lower, right)
    return found


def _pair_product(pairs: Tensor, v: Tensor) -> Tensor:
    """Multiply pairs by v, with ops chosen as in `_dots`."""
    if not _is_differentiated(pairs, v):
        return triangles.contained_of_earlier(pairs, v)
    found: Tensor = _OPS.linear_of_earlier.default(pairs, v)
    return found


def _is_differentiated(*operands: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in operands)


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


def _in_chunks(x: Tensor) -> Tensor:
    """Return (B, S, H, ...) as (N, B H, CHUNK, ...), with zeros at the end."""
    missing = -x.shape[1] % CHUNK
    if not isinstance(missing, int) or missing:
        x = F.pad(x, [0, 0] * (x.dim() - 2) + [0, missing])
    x = x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:])
    axes = (1, 0, 3, 2, *range(4, x.dim()))
    return x.permute(axes).flatten(1, 2).contiguous()


def _from_chunks(x: Tensor, batch: int, length: int, heads: int) -> Tensor:
    """Undo `_in_chunks`."""
    x = x.view(x.shape[0], batch, heads, *x.shape[2:]).permute(1, 0, 3, 2, 4)
    return x.flatten(1, 2)[:, :length]


def bounded_decays(g: Tensor) -> Tensor:
    """Clamp `g` so that its sums are finite, where it is not NaN and does not grow."""
    return g.clamp(min=_LOWEST_WIDE if g.dtype == torch.float64 else _LOWEST)


def decay_sums(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums of g (..., C): after token j and up to token i, (..., C, C), -inf where i is before j; up to each token; after each
    token."""
    found: tuple[Tensor, Tensor, Tensor] = _Sums.apply(g)  # type: ignore[no-untyped-call]
    return found


class _Sums(torch.autograd.Function):
    """The sums, forwards by differences of sums with enough digits, in one pass. Backwards by sums: a number that is not finite reaches
    only the decays between its tokens, and nothing is added that would be subtracted again."""

    @staticmethod
    def forward(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        whole = (g / _STEP).round() * _STEP
        exact, rest = torch.stack([whole, g - whole]).cumsum(-1)
        between = (exact.unsqueeze(-1) - exact.unsqueeze(-2)) + (rest.unsqueeze(-1) - rest.unsqueeze(-2))
        later = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).triu(1)
        end = (exact[..., -1:] - exact) + (rest[..., -1:] - rest)
        return between.masked_fill(later, float("-inf")), exact + rest, end

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, of_between: Tensor, of_start: Tensor, of_end: Tensor) -> Tensor:
        # All pairs around a token's decay: sums over earlier tokens, then over later ones.
        of_earlier = of_between.cumsum(-1).tril(-1).sum(-2) + of_end.cumsum(-1)
        return F.pad(of_earlier[..., :-1], (1, 0)) + of_start.flip(-1).cumsum(-1).flip(-1)
