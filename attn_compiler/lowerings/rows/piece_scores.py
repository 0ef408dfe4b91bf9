"""Biases of one piece as a tensor: numbers by distance, and ALiBi's slopes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from attn_compiler.lowerings.rows.pieces import Piece


@dataclass(kw_only=True)
class PieceScores:
    """Biases of one call.

    distances: (Hq|1, L), added where k - q + Sq - 1 is the index; None for nothing.
    slopes: (Hq,), slope · (k - q) is added; None for nothing.
    num_q: Sq.
    known: by k - q of a piece's first pair, the largest tensor so far: a smaller piece takes a part of it.
    """

    distances: torch.Tensor | None
    slopes: torch.Tensor | None
    num_q: int
    known: dict[int, torch.Tensor] = field(default_factory=dict)

    @staticmethod
    def of(operands: Mapping[str, torch.Tensor], num_q: int) -> PieceScores | None:
        """Read the biases from a call's operands by name; None if nothing is added."""
        distances, slopes = operands.get("distances"), operands.get("slopes")
        if distances is None and slopes is None:
            return None
        # The operand holds 8 shifted copies for kernels that load vectors. The first copy begins at the first distance.
        return PieceScores(distances=None if distances is None else distances[:, 0], slopes=slopes, num_q=num_q)

    def to(self, piece: Piece) -> torch.Tensor:
        """Return the biases of a piece: float32 (1, Hq|1, num_q, num_k)."""
        shift = piece.k - piece.q
        known = self.known.get(shift)
        if known is None or known.shape[2] < piece.num_q or known.shape[3] < piece.num_k:
            sizes = (0, 0) if known is None else known.shape[2:]
            known = self.known[shift] = self._made(shift, max(sizes[0], piece.num_q), max(sizes[1], piece.num_k))
        return known[:, :, : piece.num_q, : piece.num_k]

    def _made(self, shift: int, num_q: int, num_k: int) -> torch.Tensor:
        ahead = shift + torch.arange(num_k) - torch.arange(num_q)[:, None]
        made = torch.zeros((), dtype=torch.float32)
        if self.distances is not None:
            # A tensor that covers two pieces may go beyond the last distance: no piece reads that part.
            at = (ahead + self.num_q - 1).clamp(0, self.distances.shape[1] - 1)
            made = made + self.distances[:, at].float()
        if self.slopes is not None:
            made = made + self.slopes.float()[:, None, None] * ahead
        return made[None]
