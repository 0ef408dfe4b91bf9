"""The run time of sharing: which row each token is computed in, and the keys that it sees."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_compiler.passes.unpad.unpadding import Batch

#: integers of one size each, for comparisons of bits
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: odd, so that no bit of a factor is lost
_FACTOR = 0x5851F42D4C957F2D


def shared_batch(
    real: torch.Tensor, compared: Sequence[torch.Tensor], windows: Sequence[int | None]
) -> tuple[Batch, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the tokens that are computed.

    real: bool (B, S), tokens that are keys. compared: (B, S | 1, ...), numbers in which rows may differ. windows: how many positions back
    queries see, for each kind of attention; None: all.

    Returns the batch; bool (): rows that were taken to agree do so; bool (): each query has a key; int64 (): the number of groups.
    """
    batch, length = real.shape
    device = real.device
    at, row = torch.arange(length, device=device), torch.arange(batch, device=device)
    numbers = [real, *(_number(x) for x in compared)]
    differ = torch.zeros((batch, batch, length), dtype=torch.bool, device=device)
    for x in numbers:
        differ = differ | (x[:, None] != x[None])
    common = torch.where(differ, at, length).amin(2)
    leader = torch.where(at < common[:, :, None], row[:, None], batch).amin(1)
    agrees = torch.ones((), dtype=torch.bool, device=device)
    for x in compared:
        # Sums of several numbers may be equal where the numbers are not.
        if x.dim() > 2:
            flat = _bits(x).expand(batch, length, *x.shape[2:]).flatten(2)
            agrees = agrees & (flat == flat[leader, at]).all()
    flat_at = torch.arange(batch * length, device=device)
    own = Batch.from_mask(leader == row[:, None])
    place = torch.empty_like(flat_at).scatter(0, own.tokens, flat_at)
    places = place[(leader * length + at).reshape(-1)]
    # Keys of a row lie together, real ones first.
    seen = real.cumsum(1)
    start = row[:, None] * length
    behind = torch.where(real, seen - 1, seen[:, -1:] + at - seen)
    keys = torch.empty_like(places).scatter(0, (start + behind).reshape(-1), places)
    before = torch.nn.functional.pad(seen, (1, 0))
    firsts = [
        start.expand(batch, length) if left is None else start + before[:, (at - left).clamp(min=0)] for left in windows
    ]
    begins, ends = torch.stack(firsts).reshape(len(windows), -1), (start + seen).reshape(-1)
    # Rows whose first real token no earlier row computes.
    groups = (leader.gather(1, real.to(torch.int8).argmax(1, keepdim=True))[:, 0] == row).sum()
    is_token = flat_at < own.starts[-1]
    chosen = Batch(
        tokens=own.tokens,
        rows=own.rows,
        positions=own.positions,
        begins=torch.where(is_token, begins[:, own.tokens], 0).to(torch.int32),
        ends=torch.where(is_token, ends[own.tokens], 0).to(torch.int32),
        starts=own.starts,
        keys=keys,
        places=places,
    )
    return chosen, agrees, (begins < ends).all(), groups


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.bool else x.view(_BITS[x.element_size()])


def _number(x: torch.Tensor) -> torch.Tensor:
    """Return (B, S | 1): a number of each token, the same for the same bits."""
    bits = _bits(x)
    if x.dim() == 2:
        return bits
    flat = bits.flatten(2).to(torch.int64)
    factors = torch.arange(1, flat.shape[2] + 1, device=x.device) * (_FACTOR * 2 + 1 - (1 << 64)) | 1
    return (flat * factors).sum(2)
