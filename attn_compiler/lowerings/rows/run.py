"""Forward and backward of attention by rows: a call of PyTorch's flash kernel for each piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attn_compiler.lowerings.rows.pieces import Piece, cut, operand_names
from attn_compiler.lowerings.shared.calls.leaf_calls import BackwardArguments, Gradients
from attn_compiler.lowerings.shared.ops.leaf_ops import empty_outputs
from attn_compiler.spec.attention import AttentionSpec

aten = torch.ops.aten
Tensors = Sequence[torch.Tensor]


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, spec: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse, as `ops.LEAF_SCHEMA` says. A query without keys has 0, and an lse of -inf."""
    parsed = AttentionSpec.from_text(spec)
    out, lse = empty_outputs(q, v)
    named = _named(parsed, operands)
    pieces, added = cut(parsed, q, k, named), PieceScores.from_operands(named, q.shape[2])
    if not _cover(pieces, q):
        out.zero_()
        lse.fill_(-torch.inf)
    for piece in pieces:
        part, part_lse = aten._scaled_dot_product_flash_attention_for_cpu.default(
            _queries(q, piece),
            _keys(k, piece),
            _keys(v, piece),
            0.0,
            piece.causal,
            attn_mask=_additive(piece, q.dtype, added),
            scale=parsed.score.scale,
        )
        empty = _keyless(piece)
        if empty is not None:
            part, part_lse = part.masked_fill(empty[:, None], 0.0), part_lse.masked_fill(empty, -torch.inf)
        _queries(out, piece).copy_(part)
        _queries(lse, piece).copy_(part_lse)
    return out, lse


def backward(*arguments: Any) -> Gradients:
    """Return the gradients of q, k and v. Nothing reads the lse, so it has no gradient."""
    grad_out, _, q, k, v, operands, out, lse, spec = BackwardArguments(*arguments)
    parsed = AttentionSpec.from_text(spec)
    grads = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    named = _named(parsed, operands)
    added = PieceScores.from_operands(named, q.shape[2])
    for piece in cut(parsed, q, k, named):
        of_queries = _queries(grad_out, piece)
        empty = _keyless(piece)
        if empty is not None:
            of_queries = of_queries.masked_fill(empty[:, None], 0.0)
        parts = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            of_queries,
            _queries(q, piece),
            _keys(k, piece),
            _keys(v, piece),
            _queries(out, piece),
            _readable_lse(_queries(lse, piece), empty),
            0.0,
            piece.causal,
            attn_mask=_additive(piece, q.dtype, added),
            scale=parsed.score.scale,
        )
        _queries(grads[0], piece).copy_(parts[0])
        for whole, part in zip(grads[1:], parts[1:], strict=True):
            _keys(whole, piece).add_(part)
    return grads[0], grads[1], grads[2], []


def _named(spec: AttentionSpec, operands: Tensors) -> dict[str, torch.Tensor]:
    return dict(zip(operand_names(spec), operands, strict=True))


def _cover(pieces: Sequence[Piece], q: torch.Tensor) -> bool:
    """Return whether each query is in a piece. No two pieces share a query."""
    queries = sum((piece.end - piece.first) * piece.count * piece.num_q for piece in pieces)
    return queries == q.shape[0] * q.shape[2]


def _queries(x: torch.Tensor, piece: Piece) -> torch.Tensor:
    return _slice(x, piece, piece.q, piece.num_q)


def _keys(x: torch.Tensor, piece: Piece) -> torch.Tensor:
    return _slice(x, piece, piece.k, piece.num_k)


def _slice(x: torch.Tensor, piece: Piece, start: int, length: int) -> torch.Tensor:
    """Return a view (batch rows or pieces, heads, length, ...) of x (batch, heads, sequence, ...)."""
    whole = x[piece.first : piece.end, :, start : start + piece.count * length]
    return whole if piece.count == 1 else torch.unflatten(whole[0], 1, (piece.count, length)).transpose(0, 1)


def _additive(piece: Piece, dtype: torch.dtype, added: PieceScores | None) -> torch.Tensor | None:
    """Return mask and biases as the kernel takes them: in its dtype, or in float32. A query without keys sees all keys here, where the
    kernel would give NaN; the caller sets its output to 0."""
    scores = None if added is None else added.for_piece(piece)
    if piece.mask is None:
        return scores
    mask = piece.mask | ~piece.mask.any(1, keepdim=True)
    if scores is None:
        scores = torch.zeros((), dtype=dtype)
    return torch.where(mask, scores, -torch.inf).reshape(1, -1, *mask.shape)


def _keyless(piece: Piece) -> torch.Tensor | None:
    """Return which queries have no key, bool (queries,); None if each has one."""
    if piece.mask is None:
        return None
    empty = ~piece.mask.any(1)
    return empty if bool(empty.any()) else None


def _readable_lse(lse: torch.Tensor, empty: torch.Tensor | None) -> torch.Tensor:
    """Return the lse in the strides that the kernel makes it in, and so high that queries without keys have weights of 0."""
    lse = lse if empty is None else lse.masked_fill(empty, torch.finfo(lse.dtype).max)
    return lse.transpose(1, 2).contiguous().transpose(1, 2)


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
    def from_operands(operands: Mapping[str, torch.Tensor], num_q: int) -> PieceScores | None:
        """Read the biases from a call's operands by name; None if nothing is added."""
        distances, slopes = operands.get("distances"), operands.get("slopes")
        if distances is None and slopes is None:
            return None
        # The operand holds 8 shifted copies for kernels that load vectors. The first copy begins at the first distance.
        return PieceScores(distances=None if distances is None else distances[:, 0], slopes=slopes, num_q=num_q)

    def for_piece(self, piece: Piece) -> torch.Tensor:
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
