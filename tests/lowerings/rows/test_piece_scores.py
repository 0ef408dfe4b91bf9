"""What is added to a piece's scores is what the distances of its pairs say."""

from __future__ import annotations

import torch

from attn_compiler.lowerings.rows.piece_scores import PieceScores
from attn_compiler.lowerings.rows.pieces import Piece

NUM_Q, NUM_K = 6, 8


def operands() -> dict[str, torch.Tensor]:
    """The number for k - q is k - q + 5 of head 0, and a hundred more of head 1; in copies as kernels read them."""
    first = torch.arange(NUM_Q + NUM_K + 2).float()
    copies = torch.stack([first.roll(-shift) for shift in range(8)])
    return {"distances": torch.stack((copies, copies + 100))}


def piece(q: int, k: int, num_q: int, num_k: int) -> Piece:
    return Piece(first=0, end=1, q=q, k=k, num_q=num_q, num_k=num_k)


def test_nothing_is_added_without_operands_for_it() -> None:
    assert PieceScores.of({"keys": torch.ones(1, 4)}, NUM_Q) is None


def test_numbers_by_distance() -> None:
    added = PieceScores.of(operands(), NUM_Q)
    assert added is not None
    found = added.to(piece(2, 1, 2, 3))
    assert found.shape == (1, 2, 2, 3)
    assert found[0, 0].tolist() == [[4, 5, 6], [3, 4, 5]]
    assert (found[0, 1] - found[0, 0]).unique().tolist() == [100]


def test_slopes() -> None:
    added = PieceScores.of({"slopes": torch.tensor([1.0, 0.5])}, NUM_Q)
    assert added is not None
    found = added.to(piece(0, 2, 2, 2))
    assert found[0].tolist() == [[[2, 3], [1, 2]], [[1, 1.5], [0.5, 1]]]


def test_pieces_at_one_distance_share_a_tensor() -> None:
    added = PieceScores.of(operands(), NUM_Q)
    assert added is not None
    alone = [PieceScores.of(operands(), NUM_Q) for _ in range(4)]
    for x, own in zip((piece(0, 0, 2, 8), piece(1, 1, 5, 3), piece(3, 3, 2, 2), piece(4, 4, 2, 4)), alone, strict=True):
        assert own is not None
        assert torch.equal(added.to(x), own.to(x))
    assert list(added.known) == [0]
