"""The positions of the sequence that each rank has. Numbers in, numbers and tensors out: no process group is needed.

The sequence is cut into equal chunks. Contiguous: as many as ranks, and rank r has chunk r. Balanced ("head_tail"): twice as many, and
rank r has chunks r and 2 * size - 1 - r, so that under a causal mask every rank has as much to compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The layout of a sequence. size: ranks. balanced: each rank has a chunk of the first half and one of the second."""

    size: int
    balanced: bool

    @property
    def chunks(self) -> int:
        """The number of equal chunks of the sequence, which divides its length. A single rank has the whole sequence."""
        return 2 * self.size if self.balanced and self.size > 1 else self.size

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Return the chunks of a rank, in the order in which the rank has them."""
        return (rank,) if self.chunks == self.size else (rank, 2 * self.size - 1 - rank)

    def padded(self, length: int) -> int:
        """Return the least length from `length` on that can be cut."""
        return -(-length // self.chunks) * self.chunks

    def positions(self, length: int, rank: int, device: torch.device | str | None = None) -> Tensor:
        """Return int64 (length,): the positions of the sequence that a rank has. length: of the rank's part."""
        parts = self.chunks_of(rank)
        chunk = length // len(parts)
        return torch.cat([torch.arange(part * chunk, (part + 1) * chunk, device=device) for part in parts])

    def part(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """Return a rank's part of x, whose axis `dim` is the sequence. x's length is a multiple of `chunks`."""
        if self.size == 1:
            return x
        pieces = x.chunk(self.chunks, dim)
        return torch.cat([pieces[index] for index in self.chunks_of(rank)], dim)


def joined(by_rank: Tensor, axis: int, balanced: bool) -> Tensor:
    """Join (size, ..., n, ...) to (..., size · n, ...), in the order of the sequence.

    axis: that of positions in the result. balanced: a rank has one chunk from the front and one from the back, else one piece.
    """
    if balanced:
        half = by_rank.shape[axis + 1] // 2
        front = by_rank.narrow(axis + 1, 0, half)
        back = by_rank.narrow(axis + 1, half, half).flip(0)
        by_rank = torch.cat((front, back), 0)
    return torch.flatten(torch.movedim(by_rank, 0, axis), axis, axis + 1)


def split(whole: Tensor, axis: int, size: int, balanced: bool) -> Tensor:
    """Invert `joined`."""
    chunks = 2 * size if balanced else size
    by_chunk = torch.unflatten(whole, axis, (chunks, whole.shape[axis] // chunks)).movedim(axis, 0)
    if not balanced:
        return by_chunk
    return torch.cat((by_chunk.narrow(0, 0, size), by_chunk.narrow(0, size, size).flip(0)), axis + 1)
