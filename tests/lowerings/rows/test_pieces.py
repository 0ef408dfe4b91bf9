"""Pieces of rows, their scores, and runs of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load
from attn_compiler.lowerings.rows import pieces, run
from attn_compiler.lowerings.rows.pieces import Piece, operand_names
from attn_compiler.lowerings.rows.run import PieceScores
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.masks import Causal, Dense, KeyPadding, MaskSpec
from attn_compiler.spec.scores import ScoreSpec
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


# What is added to a piece's scores is what the distances of its pairs say.
NUM_Q, NUM_K = 6, 8


def operands() -> dict[str, torch.Tensor]:
    """The number for k - q is k - q + 5 of head 0, and a hundred more of head 1; in copies as kernels read them."""
    first = torch.arange(NUM_Q + NUM_K + 2).float()
    copies = torch.stack([first.roll(-shift) for shift in range(8)])
    return {"distances": torch.stack((copies, copies + 100))}


def piece(q: int, k: int, num_q: int, num_k: int) -> Piece:
    return Piece(first=0, end=1, q=q, k=k, num_q=num_q, num_k=num_k)


def test_nothing_is_added_without_operands_for_it() -> None:
    assert PieceScores.from_operands({"keys": torch.ones(1, 4)}, NUM_Q) is None


def test_numbers_by_distance() -> None:
    added = PieceScores.from_operands(operands(), NUM_Q)
    assert added is not None
    found = added.for_piece(piece(2, 1, 2, 3))
    assert found.shape == (1, 2, 2, 3)
    assert found[0, 0].tolist() == [[4, 5, 6], [3, 4, 5]]
    assert (found[0, 1] - found[0, 0]).unique().tolist() == [100]


def test_slopes() -> None:
    added = PieceScores.from_operands({"slopes": torch.tensor([1.0, 0.5])}, NUM_Q)
    assert added is not None
    found = added.for_piece(piece(0, 2, 2, 2))
    assert found[0].tolist() == [[[2, 3], [1, 2]], [[1, 1.5], [0.5, 1]]]


def test_pieces_at_one_distance_share_a_tensor() -> None:
    added = PieceScores.from_operands(operands(), NUM_Q)
    assert added is not None
    alone = [PieceScores.from_operands(operands(), NUM_Q) for _ in range(4)]
    for x, own in zip((piece(0, 0, 2, 8), piece(1, 1, 5, 3), piece(3, 3, 2, 2), piece(4, 4, 2, 4)), alone, strict=True):
        assert own is not None
        assert torch.equal(added.for_piece(x), own.for_piece(x))
    assert list(added.known) == [0]


# What the leaf op computes piece by piece, held against attention with the whole mask in float64.
BATCH, HEADS, HEADS_KV, SEQLEN, HEAD_DIM = 4, 4, 2, 37, 8
PADDING = KeyPadding(condition=ix.as_bool(Load("kept", (Index("b"), Index("k")), "int")))


@dataclass(frozen=True, kw_only=True)
class Built:
    """allowed: bool (B, Sq, Skv)."""

    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    allowed: Tensor
    text: str


def built(*, causal: bool, dtype: torch.dtype = torch.float32) -> Built:
    """Padding on the right, on the left, none, and a gap."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((BATCH, HEADS, SEQLEN, HEAD_DIM), *[(BATCH, HEADS_KV, SEQLEN, HEAD_DIM)] * 2)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    at = torch.arange(SEQLEN)
    keys = torch.stack((at < 20, at >= 11, at >= 0, (at < 5) | (at > 9)))
    allowed = keys[:, None, :].expand(BATCH, SEQLEN, SEQLEN)
    allowed = allowed & (at[:, None] >= at) if causal else allowed
    kinds = (Causal(), PADDING) if causal else (PADDING,)
    tensors = [
        TensorSpec(shape=tuple(x.shape), strides=x.stride(), dtype=str(dtype).removeprefix("torch.")) for x in (q, k, v)
    ]
    spec = AttentionSpec(
        q=tensors[0],
        k=tensors[1],
        v=tensors[2],
        mask=MaskSpec(kinds=kinds, dense=Dense(shape=(BATCH, 1, SEQLEN, SEQLEN), dtype="bool")),
        score=ScoreSpec(scale=0.3),
        device="cpu",
        out_dtype=tensors[0].dtype,
        needs_grad=True,
    )
    assert operand_names(spec) == ("keys",)
    return Built(q=q, k=k, v=v, keys=keys, allowed=allowed, text=spec.to_text())


def exact(given: Built) -> tuple[Tensor, Tensor, list[Tensor]]:
    """out, lse, and the gradients of q, k and v by the sum of out."""
    q, k, v = (x.double().requires_grad_() for x in (given.q, given.k, given.v))
    wide_k, wide_v = (x.repeat_interleave(HEADS // HEADS_KV, 1) for x in (k, v))
    scores = (q @ wide_k.mT * 0.3).masked_fill(~given.allowed[:, None], -torch.inf)
    has_key = given.allowed.any(-1)[:, None, :, None]
    out = scores.masked_fill(~has_key, 0.0).softmax(-1).masked_fill(~has_key, 0.0) @ wide_v
    return out.detach(), scores.logsumexp(-1).detach(), list(torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_outputs_and_gradients(dtype: torch.dtype, atol: float, causal: bool) -> None:
    given = built(causal=causal, dtype=dtype)
    out, lse = run.forward(given.q, given.k, given.v, [given.keys], given.text)
    expected_out, expected_lse, expected = exact(given)
    assert (out.dtype, lse.shape) == (dtype, given.q.shape[:3])
    assert out.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(out.double(), expected_out, atol=atol, rtol=atol)
    torch.testing.assert_close(lse.double(), expected_lse, atol=max(atol, 1e-6), rtol=1e-6)
    tensors = (torch.ones_like(out), torch.zeros_like(lse), given.q, given.k, given.v)
    *grads, further = run.backward(*tensors, [given.keys], out, lse, given.text)
    assert further == []
    for found, right in zip(grads, expected, strict=True):
        assert found.dtype == dtype
        assert found.is_contiguous()
        torch.testing.assert_close(found.double(), right, atol=20 * atol, rtol=20 * atol)


def test_what_is_left_out_is_not_read() -> None:
    """NaN in padding reaches neither outputs nor gradients."""
    given = built(causal=True)
    hidden = ~given.keys
    # In the row with a gap the kernel reads what it masks.
    hidden[3] = False
    for x in (given.k, given.v):
        x.masked_fill_(hidden[:, None, :, None], torch.nan)
    out, lse = run.forward(given.q, given.k, given.v, [given.keys], given.text)
    *grads, _ = run.backward(
        torch.ones_like(out), torch.zeros_like(lse), given.q, given.k, given.v, [given.keys], out, lse, given.text
    )
    assert not any(x.isnan().any() for x in (out, lse, *grads))


def test_a_query_without_keys_is_zero() -> None:
    given = built(causal=True)
    out, lse = run.forward(given.q, given.k, given.v, [given.keys], given.text)
    without = ~given.allowed.any(-1)
    assert without.any()
    assert out.transpose(1, 2)[without].abs().max() == 0
    assert (lse.transpose(1, 2)[without] == -torch.inf).all()
