"""The exchange of halos: the halo of a rank's chunks comes from the ranks that have it, and its gradient goes back to them.

The amounts that ranks send to each other depend on the rank, and no graph holds a rank. So the exchange is one op that looks where it
runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attn_compiler.context_parallel.collectives import sent_and_received
from attn_compiler.context_parallel.halo import Halo, HaloPiece, of_rank
from attn_compiler.context_parallel.layout import Layout
from attn_compiler.context_parallel.rank_sync import rank_of
from attn_compiler.torch_private.op_library import NAMESPACE, register_helper

#: pieces by rank
_Pieces = Sequence[Sequence[HaloPiece]]

#: the axis of positions in (B, H, chunks, positions, D)
_POSITIONS = 3


def _halo(ends: torch.Tensor, left: int, right: int, chunk: int, size: int, balanced: bool, group: str) -> torch.Tensor:
    """Exchange (B, H, rank's chunks, tail + head, D) for (B, H, chunks, left + right, D), 0 outside of the sequence."""
    sending, coming = _pieces(left, right, chunk, size, balanced, group)
    found = _fake_halo(ends, left, right, chunk, size, balanced, group).zero_()
    sent = [[_place(ends, one.source, one.start, one) for one in to] for to in sending]
    for there, values in _exchanged(found, sent, coming, group):
        _place(found, there.target, there.into, there).copy_(values)
    return found


def _halo_gradient(
    grad: torch.Tensor, left: int, right: int, chunk: int, size: int, balanced: bool, group: str
) -> torch.Tensor:
    """Apply the transpose of `_halo`: the gradients of all uses of a rank's ends are added up."""
    # The receivers send back.
    coming, sending = _pieces(left, right, chunk, size, balanced, group)
    found = _fake_gradient(grad, left, right, chunk, size, balanced, group).zero_()
    sent = [[_place(grad, one.target, one.into, one) for one in to] for to in sending]
    for here, values in _exchanged(found, sent, coming, group):
        _place(found, here.source, here.start, here).add_(values)
    return found


def _pieces(left: int, right: int, chunk: int, size: int, balanced: bool, group: str) -> tuple[_Pieces, _Pieces]:
    """Return the pieces that this rank sends to each rank, and those that come to it from each."""
    halo, layout = Halo(left=left, right=right, chunk=chunk), Layout(size=size, balanced=balanced)
    return of_rank(layout, halo, rank_of(group))


def _place(x: torch.Tensor, chunk: int, start: int, piece: HaloPiece) -> torch.Tensor:
    return x.select(_POSITIONS - 1, chunk).narrow(_POSITIONS - 1, start, piece.count)


def _exchanged(
    like: torch.Tensor, sent: Sequence[Sequence[torch.Tensor]], coming: Sequence[Sequence[HaloPiece]], group: str
) -> list[tuple[HaloPiece, torch.Tensor]]:
    """Return every piece that comes, with its values. sent: by receiving rank."""
    b, h, *_, d = like.shape
    flat = [x.reshape(-1) for to in sent for x in to]
    buffer = torch.cat(flat) if flat else like.new_empty(0)
    counts = [[sum(x.numel() for x in to) for to in sent], [sum(x.count for x in them) * b * h * d for them in coming]]
    theirs = sent_and_received(buffer, counts[0], counts[1], group)
    all_pieces = [piece for them in coming for piece in them]
    values = torch.split(theirs, [piece.count * b * h * d for piece in all_pieces]) if all_pieces else ()
    return [(piece, one.view(b, h, piece.count, d)) for piece, one in zip(all_pieces, values, strict=True)]


def _fake_halo(
    ends: torch.Tensor, left: int, right: int, chunk: int, size: int, balanced: bool, group: str
) -> torch.Tensor:
    return ends.new_empty((*ends.shape[:_POSITIONS], left + right, ends.shape[-1]))


def _fake_gradient(
    grad: torch.Tensor, left: int, right: int, chunk: int, size: int, balanced: bool, group: str
) -> torch.Tensor:
    halo = Halo(left=left, right=right, chunk=chunk)
    return grad.new_empty((*grad.shape[:_POSITIONS], halo.tail + halo.head, grad.shape[-1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.given = inputs[1:]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return halo_gradient(grad, *ctx.given), *(None for _ in ctx.given)


_ARGUMENTS = "int left, int right, int chunk, int size, bool balanced, str group"
register_helper("halo_gradient", f"(Tensor grad, {_ARGUMENTS}) -> Tensor", function=_halo_gradient, fake=_fake_gradient)
register_helper(
    "halo",
    f"(Tensor ends, {_ARGUMENTS}) -> Tensor",
    function=_halo,
    fake=_fake_halo,
    differentiated=(_setup_context, _backward),
)

halo = getattr(torch.ops, NAMESPACE).halo.default
halo_gradient = getattr(torch.ops, NAMESPACE).halo_gradient.default
