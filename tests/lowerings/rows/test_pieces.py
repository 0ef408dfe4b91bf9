from __future__ import annotations

import pytest
import torch

from attn_compiler.lowerings.rows import pieces
from attn_compiler.lowerings.rows.pieces import Piece
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from attn_compiler.spec.attention import AttentionSpec
from tests.lowerings.specs import make_spec


def runs(num_q: int, num_k: int, *, band: Band | None = None, **tensors: torch.Tensor) -> list[Piece]:
    """The pieces of the first batch row."""
    names = ("rows", "keys", "documents_q", "documents_k")
    given = {name: tensors.get(name) for name in names}
    call = pieces._Call(**given, band=band, num_q=num_q, num_k=num_k)
    return list(call.of_batch_row(0))


def test_padding_is_one_piece_without_a_mask() -> None:
    (piece,) = runs(8, 8, keys=torch.arange(8)[None] < 5)
    assert (piece.k, piece.num_k, piece.num_q, piece.mask) == (0, 5, 8, None)


def test_gaps_need_a_mask() -> None:
    (piece,) = runs(4, 8, keys=torch.tensor([[0, 1, 1, 0, 1, 0, 0, 0]], dtype=torch.bool))
    assert (piece.k, piece.num_k) == (1, 4)
    assert piece.mask is not None
    assert piece.mask[0].tolist() == [True, True, False, True]


def test_documents_are_pieces_and_equal_ones_a_batch() -> None:
    of = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2]])
    found = runs(8, 8, documents_q=of, documents_k=of)
    assert [(p.q, p.num_q, p.k, p.num_k) for p in found] == [(0, 3, 0, 3), (3, 3, 3, 3), (6, 2, 6, 2)]
    assert [(p.q, p.num_q, p.count) for p in pieces._joined(found, counts_distances=True)] == [(0, 3, 2), (6, 2, 1)]


def test_runs_that_follow_each_other_at_other_distances_are_apart_where_these_count() -> None:
    """Four queries, then four others, each with two keys."""
    found = [Piece(first=0, end=1, q=q, k=q // 2, num_q=4, num_k=2) for q in (0, 4)]
    assert len(pieces._joined(found, counts_distances=False)) == 1
    assert len(pieces._joined(found, counts_distances=True)) == 2


def test_a_diagonal_within_documents_is_a_flag() -> None:
    of = torch.tensor([[0, 0, 0, 1, 1, 1]])
    assert all(p.causal and p.mask is None for p in runs(6, 6, documents_q=of, documents_k=of, band=Band(right=0)))


def test_a_window_is_cut_into_blocks_that_share_masks() -> None:
    found = runs(256, 256, band=Band(left=8, right=8), keys=torch.ones(1, 256, dtype=torch.bool))
    assert [(p.q, p.k, p.num_k) for p in found] == [(0, 0, 72), (64, 56, 80), (128, 120, 80), (192, 184, 72)]
    assert found[1].mask is found[2].mask


def test_batch_rows_that_are_alike_are_one_piece() -> None:
    alike = [Piece(first=b, end=b + 1, q=0, k=0, num_q=4, num_k=4) for b in range(3)]
    assert pieces._joined(alike, counts_distances=True) == [Piece(first=0, end=3, q=0, k=0, num_q=4, num_k=4)]


def test_a_query_of_no_document_is_in_no_piece() -> None:
    found = runs(3, 4, documents_q=torch.tensor([[0, 5, 1]]), documents_k=torch.tensor([[0, 0, 1, 1]]))
    assert [(p.q, p.num_q, p.k, p.num_k) for p in found] == [(0, 1, 0, 2), (2, 1, 2, 2)]


def test_ranges_that_differ_and_are_all_empty_are_no_piece() -> None:
    at = torch.arange(32)[None]
    assert runs(32, 32, rows=torch.stack((at, torch.zeros_like(at)))) == []
    assert runs(32, 32, rows=torch.stack((at, at + 4)), keys=torch.zeros(1, 32, dtype=torch.bool)) == []


def test_short_intervals_without_a_common_key_stay_apart() -> None:
    """As the rows of a packed batch are: what one holds must not reach the others."""
    begins = torch.arange(32)[None] // 2 * 2
    found = runs(32, 32, rows=torch.stack((begins, begins + 2)))
    assert [(p.q, p.num_q, p.k, p.num_k, p.mask) for p in found] == [(q, 2, q, 2, None) for q in range(0, 32, 2)]


def test_short_intervals_with_common_keys_are_one_call() -> None:
    begins = torch.arange(32)[None] // 2 * 2
    (piece,) = runs(32, 32, rows=torch.stack((begins, begins + 3)))
    assert (piece.num_q, piece.num_k) == (32, 32)
    assert piece.mask is not None


def test_documents_whose_queries_are_mixed_stay_apart() -> None:
    of_keys = torch.arange(64)[None] // 8
    mixed = of_keys[:, torch.randperm(64, generator=torch.Generator().manual_seed(0))]
    assert all(p.num_k == 8 and p.mask is None for p in runs(64, 64, documents_q=mixed, documents_k=of_keys))


def test_pieces_are_kept_by_the_numbers_that_they_are_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers ask with the same numbers. Memory may hold others at the next call, and two calls may share a place in memory."""
    monkeypatch.setattr(pieces, "_KEPT", {})
    monkeypatch.setattr(pieces, "_MOST_KEPT", 2)
    spec, x = make_spec(), torch.zeros(2, 1, 8, 4)
    keys = torch.arange(8)[None] < torch.tensor([[5], [8]])

    def lengths(spec: AttentionSpec = spec, q: torch.Tensor = x) -> list[int]:
        return [piece.num_k for piece in pieces.cut(spec, q, x, {"keys": keys})]

    first = pieces.cut(spec, x, x, {"keys": keys})
    assert pieces.cut(spec, x, x, {"keys": keys.clone(), "slopes": torch.ones(1)}) is first
    assert lengths() == [5, 8]
    keys[0, 3:] = False
    assert lengths() == [3, 8]
    assert lengths(q=x[:1]) == [3]
    assert lengths(make_spec(seqlen_q=8)) == [3, 8]
    assert len(pieces._KEPT) == 1
    assert len(pieces.cut(spec, x, x, {"keys": keys.int()})) == 2
