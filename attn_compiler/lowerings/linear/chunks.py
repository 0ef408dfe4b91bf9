"""The recurrence by chunks, in plain ops whose number does not depend on the length: all chunks at once, but for one scan.

Within a chunk, G is the sum of g up to a token, and the decay from token j to a later token i is exp(Gᵢ - Gⱼ), which is never above 1
where g is not. With the delta rule the values of a chunk solve a triangular system (the WY form of products of Householder matrices:
Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.lowerings.graph_ops.linear_recurrence import LinearOperands
from attn_compiler.lowerings.linear import scan_ops  # noqa: F401 (the ops are registered by the import)
from attn_compiler.torch_private.op_library import NAMESPACE

#: tokens of a chunk
CHUNK = 64
#: rows that a decay for each channel is taken of at once
_ROWS = 16


def by_chunks(given: LinearOperands, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """As `token_by_token`: o (B, S, H, V), and the state after the last token."""
    batch, length, heads, dim_v = given.v.shape
    if isinstance(length, int) and length == 1:
        return one_token(given)
    q, k, v, g = (_in_chunks(x, chunk) for x in (given.q, given.k, given.v, given.g))
    beta = None if given.beta is None else _in_chunks(given.beta, chunk).unsqueeze(-1)
    rows = [q] if beta is None else [q, k * beta]
    # Before the sums: what stands between two products or sums is one kernel, whose compilation takes a second on a CPU.
    dots = None if g.dim() == k.dim() else _dots(rows, k)
    sums = g.cumsum(2)
    of_channels = sums.unsqueeze(-1) if dots is not None else sums
    grown = of_channels.exp()
    if dots is None:
        pairs, *lower = (_pairs_by_channel(x, k, sums) for x in rows)
    else:
        pairs, *lower = (dots * _decays(sums).unsqueeze(-3)).unbind(-3)
    w: Tensor | None = None
    if beta is not None:
        solved = _solve(lower[0], torch.cat([v * beta, rows[1] * grown], -1))
        v, w = solved[..., :dim_v], solved[..., dim_v:]
    kd, cd = k * (of_channels[..., -1:, :] - of_channels).exp(), grown[..., -1, :, None]
    if isinstance(length, int) and length <= chunk:
        out, last = _one_chunk(given, q * grown, v, w, kd, cd, pairs)
    else:
        state = given.first_state.flatten(0, 1)
        states, last, seen = getattr(torch.ops, NAMESPACE).linear_scan.default(v, kd, cd, state, w)
        out = torch.baddbmm(_flat(pairs @ (v if w is None else seen)), _flat(q * grown), _flat(states))
    return _from_chunks(out.view(*v.shape), batch, length, heads), last.view(batch, heads, *last.shape[1:])


def one_token(given: LinearOperands) -> tuple[Tensor, Tensor]:
    """Of one token, in ops that fuse."""
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
    """Of one chunk there is nothing to scan. q: with the decay from the chunk's first token. Without a state, nothing is read of one."""
    if given.state is None:
        return _flat(pairs @ v), _flat(kd.mT @ v)
    state = given.state.flatten(0, 1).unsqueeze(0)
    seen = v if w is None else v - w @ state
    return _flat(pairs @ seen + q @ state), _flat(state * cd + kd.mT @ seen)


def _solve(lower: Tensor, right: Tensor) -> Tensor:
    """Where nothing is differentiated, by PyTorch's own op, which takes the host less."""
    if not (torch.is_grad_enabled() and (lower.requires_grad or right.requires_grad)):
        solved: Tensor = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
        return solved
    found: Tensor = getattr(torch.ops, NAMESPACE).linear_solve.default(lower, right)
    return found


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


def _in_chunks(x: Tensor, chunk: int) -> Tensor:
    """(B, S, H, ...) as (N, B H, chunk, ...), with zeros at the end."""
    missing = -x.shape[1] % chunk
    if not isinstance(missing, int) or missing:
        x = F.pad(x, [0, 0] * (x.dim() - 2) + [0, missing])
    x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
    axes = (1, 0, 3, 2, *range(4, x.dim()))
    return x.permute(axes).flatten(1, 2)


def _from_chunks(x: Tensor, batch: int, length: int, heads: int) -> Tensor:
    """Inverse of `_in_chunks`."""
    x = x.view(x.shape[0], batch, heads, *x.shape[2:]).permute(1, 0, 3, 2, 4)
    return x.flatten(1, 2)[:, :length]


def _dots(rows: list[Tensor], y: Tensor) -> Tensor:
    """xᵢ · yⱼ of each x of `rows`, in one product: (N, P, X, C, C), of X of them."""
    stacked = rows[0] if len(rows) == 1 else torch.stack(rows, -3).flatten(-3, -2)
    found = stacked @ y.mT
    return found.view(*found.shape[:-2], len(rows), y.shape[-2], y.shape[-2])


def _decays(sums: Tensor) -> Tensor:
    """From token j to token i, for j up to i; 0 after it."""
    later = torch.ones(sums.shape[-1], sums.shape[-1], dtype=torch.bool, device=sums.device).triu(1)
    return (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()


def _pairs_by_channel(x: Tensor, y: Tensor, sums: Tensor) -> Tensor:
    """xᵢ · yⱼ with the decay from token j to token i, for j up to i; 0 after it.

    By blocks of rows: what comes before a block is a product around the block's first row, whose exponents are none above 0.
    """
    size = x.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
    rows = []
    for first in range(0, size, _ROWS):
        last = min(first + _ROWS, size)
        own, keys = sums[..., first:last, :], y[..., first:last, :]
        decay = (own.unsqueeze(-2) - own.unsqueeze(-3)).masked_fill(later[first:last, first:last, None], float("-inf"))
        block = (x[..., first:last, None, :] * keys.unsqueeze(-3) * decay.exp()).sum(-1)
        parts = [block, x.new_zeros(*x.shape[:-2], last - first, size - last)]
        if first:
            base = own[..., :1, :]
            rest = y[..., :first, :] * (base - sums[..., :first, :]).exp()
            parts.insert(0, (x[..., first:last, :] * (own - base).exp()) @ rest.mT)
        rows.append(torch.cat(parts, -1))
    return torch.cat(rows, -2)
