from __future__ import annotations

import dataclasses

import pytest
import torch

from attn_compiler import masks
from attn_compiler.masks import (
    Alignment,
    AnyOf,
    Causal,
    CausalFrom,
    Chunked,
    Dense,
    Document,
    Formula,
    KeyBound,
    KeyPadding,
    MaskSpec,
    Opaque,
    SlidingWindow,
)

BOTTOM_RIGHT = Causal(alignment=Alignment.BOTTOM_RIGHT)


def _table(kind: Causal, seqlen_q: int, seqlen_kv: int) -> torch.Tensor:
    rows = [
        [kind.mask_mod(q, k, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv) for k in range(seqlen_kv)] for q in range(seqlen_q)
    ]
    return torch.tensor(rows)


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(4, 4), (3, 7), (7, 3), (1, 5)])
def test_causal_from_either_corner(seqlen_q: int, seqlen_kv: int) -> None:
    ones = torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool)
    assert torch.equal(_table(Causal(), seqlen_q, seqlen_kv), ones.tril())
    assert torch.equal(_table(BOTTOM_RIGHT, seqlen_q, seqlen_kv), ones.tril(seqlen_kv - seqlen_q))


def test_causal_is_what_pytorch_means_by_is_causal() -> None:
    q, k = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 7, 8)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(sdpa(q, k, k, is_causal=True), sdpa(q, k, k, attn_mask=_table(Causal(), 3, 7)))


@pytest.mark.parametrize(
    ("window", "wanted"),
    [
        (SlidingWindow(left=1, right=0), lambda q, k: q - 1 <= k <= q),
        (SlidingWindow(left=2, right=2), lambda q, k: abs(q - k) <= 2),
        (SlidingWindow(left=None, right=1), lambda q, k: k <= q + 1),
        (SlidingWindow(left=3, right=None), lambda q, k: k >= q - 3),
        (SlidingWindow(left=None, right=None), lambda q, k: True),
    ],
)
def test_sliding_window(window: SlidingWindow, wanted: object) -> None:
    assert callable(wanted)
    assert all(window.mask_mod(q, k) == wanted(q, k) for q in range(6) for k in range(6))


def test_chunks() -> None:
    assert [Chunked(size=2).mask_mod(3, k) for k in range(6)] == [False, False, True, True, False, False]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Causal(), "causal"),
        (BOTTOM_RIGHT, "causal (bottom-right)"),
        (Dense(shape=(2, 1, "s0", "s0"), dtype="bool"), "dense bool[2, 1, s0, s0]"),
        (Dense(shape=(1,), dtype="float32", terms=3), "dense additive float32[1] from 3 tensors"),
        (Opaque(reason="a lookup"), "opaque (a lookup)"),
        (CausalFrom(offset="past[0]"), "causal from past[0]"),
        (SlidingWindow(left=3, right=None), "window (3 back)"),
        (SlidingWindow(left=3, right=1), "window (3 back, 1 ahead)"),
        (KeyPadding(tensor="mask", text="mask[b, k] ≠ 0"), "key padding mask[b, k] ≠ 0"),
        (KeyBound(side="last", bound="n[b]"), "keys up to n[b]"),
        (KeyBound(side="first", bound="n[b]"), "keys from n[b]"),
        (Document(tensor="ids"), "document ids[b, q] = ids[b, k]"),
        (Chunked(size=8), "chunks of 8"),
        (Formula(text="q < k"), "q < k"),
        (AnyOf(alternatives=((Causal(), Chunked(size=8)), (Formula(text="x"),))), "(causal ∧ chunks of 8) or (x)"),
    ],
)
def test_words(kind: masks.MaskKind | masks.ProvedKind, words: str) -> None:
    assert kind.words == words


def test_every_kind_has_words_and_is_tested_above() -> None:
    tested = {type(mark[0]) for mark in test_words.pytestmark[0].args[1]}
    assert tested == set(masks.KINDS) | set(masks.PROVED_KINDS)


def test_words_of_a_mask() -> None:
    dense = Dense(shape=(1,), dtype="bool")
    assert masks.NO_MASK.words == "none"
    assert MaskSpec(kinds=(Causal(), dense)).words == "causal ∧ dense bool[1]"
    assert MaskSpec(kinds=(Causal(),), proved=(Causal(),)).words == "causal (proved)"
    proved = MaskSpec(kinds=(dense,), proved=(Causal(), KeyBound(side="last", bound="n")))
    assert proved.words == "causal ∧ keys up to n (proved), as dense bool[1]"


def test_parts_of_a_mask() -> None:
    dense = Dense(shape=(1,), dtype="float32")
    assert MaskSpec(kinds=(Causal(), dense)).is_causal
    assert MaskSpec(kinds=(Causal(), dense)).dense is dense
    assert not MaskSpec(kinds=(dense,)).is_causal
    assert MaskSpec(kinds=(Causal(),)).dense is None
    # What it was shown to be is not what a lowering has to apply.
    assert not MaskSpec(kinds=(dense,), proved=(Causal(),)).is_causal


@pytest.mark.parametrize(("dtype", "is_bool"), [("bool", True), ("float32", False)])
def test_dense_of_either_kind(dtype: str, is_bool: bool) -> None:
    assert Dense(shape=(1,), dtype=dtype).is_bool == is_bool


@pytest.mark.parametrize("kind", [*masks.KINDS, *masks.PROVED_KINDS])
def test_kinds_are_frozen_and_hashable(kind: type[masks.MaskKind]) -> None:
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
