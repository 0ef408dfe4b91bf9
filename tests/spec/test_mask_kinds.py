"""Masks and their kinds."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Index, Load, Size
from attn_compiler.spec import added_scores, mask_kinds, masks, reads
from attn_compiler.spec.added_scores import ProvedScore
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.chosen_keys import Chosen
from attn_compiler.spec.masks import (
    Alignment,
    AnyOf,
    Causal,
    CausalFrom,
    Chunked,
    Dense,
    Document,
    Flag,
    Formula,
    KeyBound,
    KeyPadding,
    MaskKind,
    MaskSpec,
    Prefix,
    SlidingWindow,
)
from tests.lowerings.specs import make_spec
from tests.spec.meanings import Inputs, allows, names

B, H, Q, K = map(Index, "bhqk")
SEQLEN_Q, SEQLEN_KV = 5, 7
TENSORS = {
    "padding": torch.tensor([[1, 1, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1]]),
    "ids": torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 2, 2, -1, -1]]),
    "lengths": torch.tensor([3, 6]),
    "past": torch.tensor(2),
}
PADDING, IDS, LENGTH = (
    Load("padding", (B, K), "int"),
    Load("ids", (B, K), "int"),
    Load("lengths", (B,), "int"),
)
BOTTOM_RIGHT = Causal(alignment=Alignment.BOTTOM_RIGHT)


def _element(tensor: str, at: tuple[int, ...]) -> int:
    return int(TENSORS[tensor][at].item())


def _table(kind: masks.MaskKind, seqlen_q: int = SEQLEN_Q, seqlen_kv: int = SEQLEN_KV, b: int = 0) -> torch.Tensor:
    """The kind's meaning for every pair of one batch row."""
    inputs = Inputs(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, load=_element, sizes={"s0": 2})
    rows = [[allows(kind, b, 0, q, k, inputs) for k in range(seqlen_kv)] for q in range(seqlen_q)]
    assert all(type(allowed) is bool for row in rows for allowed in row)
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


#: a kind -> its table for a batch row, written with tensors: rows q, columns k
MEANINGS: list[tuple[masks.MaskKind, Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]]] = [
    (Causal(), lambda q, k, b: k <= q),
    (BOTTOM_RIGHT, lambda q, k, b: k <= q + 2),
    (CausalFrom(offset=Const(-1)), lambda q, k, b: k < q),
    (CausalFrom(offset=Size("s0")), lambda q, k, b: k <= q + 2),
    (CausalFrom(offset=Load("past", (), "int")), lambda q, k, b: k <= q + TENSORS["past"]),
    (SlidingWindow(left=1, right=0), lambda q, k, b: (k >= q - 1) & (k <= q)),
    (SlidingWindow(left=2, right=2), lambda q, k, b: (q - k).abs() <= 2),
    (SlidingWindow(left=None, right=1), lambda q, k, b: k <= q + 1),
    (SlidingWindow(left=3, right=None), lambda q, k, b: k >= q - 3),
    (SlidingWindow(left=None, right=None), lambda q, k, b: k == k),
    (Prefix(length=Const(3)), lambda q, k, b: (k < 3) | (k <= q)),
    (Prefix(length=LENGTH), lambda q, k, b: (k < TENSORS["lengths"][b]) | (k <= q)),
    (KeyPadding(condition=ix.as_bool(PADDING)), lambda q, k, b: TENSORS["padding"][b][k] != 0),
    (KeyPadding(condition=ix.compare("==", IDS, Const(1))), lambda q, k, b: TENSORS["ids"][b][k] == 1),
    (KeyBound(side="last", bound=LENGTH), lambda q, k, b: k <= TENSORS["lengths"][b]),
    (KeyBound(side="first", bound=LENGTH), lambda q, k, b: k >= TENSORS["lengths"][b]),
    (Document(of_key=IDS), lambda q, k, b: TENSORS["ids"][b][q] == TENSORS["ids"][b][k]),
    (Chunked(size=2), lambda q, k, b: q // 2 == k // 2),
    (
        Chunked(size=2, start=LENGTH),
        lambda q, k, b: (q - TENSORS["lengths"][b]) // 2 == (k - TENSORS["lengths"][b]) // 2,
    ),
    (
        AnyOf(alternatives=((Causal(), Chunked(size=4)), (Document(of_key=IDS),))),
        lambda q, k, b: ((k <= q) & (q // 4 == k // 4)) | (TENSORS["ids"][b][q] == TENSORS["ids"][b][k]),
    ),
    (Formula(condition=ix.compare("==", ix.add(Q, K), Const(4))), lambda q, k, b: q + k == 4),
]


@pytest.mark.parametrize("b", [0, 1])
@pytest.mark.parametrize(("kind", "wanted"), MEANINGS, ids=[kind.words for kind, _ in MEANINGS])
def test_what_a_kind_allows(
    kind: masks.MaskKind, wanted: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor], b: int
) -> None:
    table = wanted(torch.arange(SEQLEN_Q)[:, None], torch.arange(SEQLEN_KV)[None, :], b)
    assert torch.equal(_table(kind, b=b), table.expand(SEQLEN_Q, SEQLEN_KV))


@pytest.mark.parametrize("kind", [kind for kind, _ in MEANINGS], ids=lambda kind: kind.words)
def test_the_condition_is_the_meaning(kind: masks.MaskKind) -> None:
    inputs = Inputs(seqlen_q=SEQLEN_Q, seqlen_kv=SEQLEN_KV, load=_element, sizes={"s0": 2})
    for b, q, k in itertools.product(range(2), range(SEQLEN_Q), range(SEQLEN_KV)):
        assert bool(inputs.value(kind.condition, b, 0, q, k)) is allows(kind, b, 0, q, k, inputs), (b, q, k)


def test_no_kind_lets_every_pair_through() -> None:
    assert masks.all_of(()) == ix.TRUE


def test_every_proved_kind_is_tested_above() -> None:
    assert {type(kind) for kind, _ in MEANINGS} == set(masks.KINDS)


@pytest.mark.parametrize(
    ("kind", "words", "formula"),
    [
        (Causal(), "causal", "k <= q"),
        (BOTTOM_RIGHT, "causal (bottom-right)", "k <= q + Skv - Sq"),
        (Dense(shape=(2, 1, "s0", "s0"), dtype="bool"), "dense bool[2, 1, s0, s0]", None),
        (Dense(shape=(1,), dtype="float32", terms=3), "dense additive float32[1] from 3 tensors", None),
        (CausalFrom(offset=Load("past", (), "int")), "causal from past", "k <= q + past"),
        (CausalFrom(offset=Const(-1)), "strictly causal", "k + 1 <= q"),
        (SlidingWindow(left=3, right=None), "window (3 back)", "q - 3 <= k"),
        (SlidingWindow(left=3, right=1), "window (3 back, 1 ahead)", "q - 3 <= k <= q + 1"),
        (Prefix(length=LENGTH), "causal after a prefix of lengths[b]", "(k < lengths[b] ∨ k <= q)"),
        (KeyPadding(condition=ix.as_bool(PADDING)), "key padding padding[b, k]", "padding[b, k] ≠ 0"),
        (KeyPadding(condition=ix.invert(ix.as_bool(PADDING))), "key padding ¬padding[b, k]", "padding[b, k] = 0"),
        (
            KeyPadding(condition=ix.compare("==", IDS, Const(1))),
            "keys where ids[b, k] = 1",
            "ids[b, k] = 1",
        ),
        (KeyBound(side="last", bound=LENGTH), "right padding, keys up to lengths[b]", "k <= lengths[b]"),
        (KeyBound(side="first", bound=LENGTH), "left padding, keys from lengths[b]", "lengths[b] <= k"),
        (KeyBound(side="last", bound=Load("past", (), "int")), "keys up to past", "k <= past"),
        (Document(of_key=IDS), "document ids[b, q] = ids[b, k]", "ids[b, q] = ids[b, k]"),
        (Chunked(size=8), "chunks of 8", "(k // 8) = (q // 8)"),
        (
            Chunked(size=8, start=LENGTH),
            "chunks of 8 from lengths[b]",
            "((k - lengths[b]) // 8) = ((q - lengths[b]) // 8)",
        ),
        (Formula(condition=ix.compare("<", Q, K)), "q + 1 <= k", "q + 1 <= k"),
        (
            AnyOf(alternatives=((Causal(), Chunked(size=8)), (Document(of_key=IDS),))),
            "(causal ∧ chunks of 8) ∨ document ids[b, q] = ids[b, k]",
            "((k <= q ∧ (k // 8) = (q // 8)) ∨ ids[b, q] = ids[b, k])",
        ),
    ],
)
def test_words_and_formula(kind: masks.MaskKind | Dense, words: str, formula: str | None) -> None:
    assert kind.words == words
    assert getattr(kind, "formula", None) == formula


def test_every_kind_has_words_and_is_tested_above() -> None:
    tested = {type(mark[0]) for mark in test_words_and_formula.pytestmark[0].args[1]}
    assert tested == {*masks.KINDS, Dense}


def test_alternatives_beside_another_kind_stand_in_brackets() -> None:
    either = AnyOf(alternatives=((Causal(),), (Document(of_key=IDS),)))
    assert masks.MaskSpec(kinds=(either,)).words == "causal ∨ document ids[b, q] = ids[b, k] (proved), within the bias"
    both = masks.MaskSpec(kinds=(either, Chunked(size=8))).words
    assert both.startswith("(causal ∨ document ids[b, q] = ids[b, k]) ∧ chunks of 8 (proved)")


@pytest.mark.parametrize(("dtype", "is_bool"), [("bool", True), ("float32", False)])
def test_dense_of_either_kind(dtype: str, is_bool: bool) -> None:
    assert Dense(shape=(1,), dtype=dtype).is_bool == is_bool


@pytest.mark.parametrize("kind", [*masks.KINDS, Dense])
def test_kinds_are_frozen_and_hashable(kind: type[masks.MaskKind]) -> None:
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


MASKS_PADDING = Load("padding", (B, K), "int")


def test_every_kind_is_had_from_here() -> None:
    kinds = (*mask_kinds.KINDS, mask_kinds.Dense)
    assert [kind for kind in kinds if getattr(masks, kind.__name__, None) is not kind] == []


def test_words_of_a_mask() -> None:
    dense = Dense(shape=(1,), dtype="bool")
    assert MaskSpec().words == "none"
    assert MaskSpec(kinds=(Causal(),), flag=Flag.CALLED, dense=dense).words == "causal ∧ dense bool[1]"
    assert MaskSpec(kinds=(Causal(),), flag=Flag.READ).words == "causal (proved)"
    proved = MaskSpec(kinds=(Causal(), KeyPadding(condition=ix.as_bool(MASKS_PADDING))), dense=dense)
    assert proved.words == "causal ∧ key padding padding[b, k] (proved)"
    assert MaskSpec(kinds=(Causal(),)).words == "causal (proved), within the bias"
    assert proved.formula == "k <= q ∧ padding[b, k] ≠ 0"
    assert MaskSpec(dense=dense, reason="it is not in the graph").formula is None


def test_words_of_a_mask_that_was_read_in_part() -> None:
    dense = Dense(shape=(2, 1, 5, 7), dtype="bool")
    rest = Formula(condition=ix.invert(Load("chosen", (B, Q, K), "bool")))
    mask = MaskSpec(kinds=(Causal(), KeyPadding(condition=ix.as_bool(MASKS_PADDING))), dense=dense, reason="not read")
    assert mask.is_partial
    assert mask.words == "causal ∧ key padding padding[b, k] (proved) ∧ a rest, as dense bool[2, 1, 5, 7]"
    assert mask.formula == "k <= q ∧ padding[b, k] ≠ 0 ∧ …"
    assert mask.conditions == mask.kinds
    known = dataclasses.replace(mask, rest=rest)
    assert known.words.startswith("causal ∧ key padding padding[b, k] (proved) ∧ ¬chosen[b, q, k], as dense")
    assert known.formula == "k <= q ∧ padding[b, k] ≠ 0 ∧ ¬chosen[b, q, k]"
    assert known.conditions == (*mask.kinds, rest)
    within = dataclasses.replace(mask, dense=None)
    assert within.words.endswith("∧ a rest, within the bias")
    called = dataclasses.replace(mask, kinds=(Causal(),), flag=Flag.CALLED)
    assert not called.is_partial
    assert called.formula is None


def test_parts_of_a_mask() -> None:
    dense = Dense(shape=(1,), dtype="float32")
    assert MaskSpec(kinds=(Causal(),), flag=Flag.CALLED, dense=dense).is_causal
    assert MaskSpec(kinds=(Causal(),), flag=Flag.CALLED, dense=dense).dense is dense
    assert not MaskSpec(dense=dense).is_causal
    assert MaskSpec(kinds=(Causal(),), flag=Flag.CALLED).dense is None
    # What it was shown to be is not what a lowering has to apply.
    assert not MaskSpec(kinds=(Causal(),), dense=dense).is_causal


def test_each_kind_stands_once_and_says_how_it_is_known() -> None:
    dense, padding = Dense(shape=(1,), dtype="bool"), KeyPadding(condition=ix.as_bool(MASKS_PADDING))
    called = MaskSpec(kinds=(Causal(), padding), flag=Flag.CALLED, dense=dense)
    assert (called.flagged, called.held, called.read) == (Causal(), (padding,), (padding,))
    read = MaskSpec(kinds=(Causal(),), flag=Flag.READ)
    assert (read.flagged, read.held, read.read) == (Causal(), (), (Causal(),))
    within = MaskSpec(kinds=(Causal(), padding), dense=dense)
    assert (within.flagged, within.held, within.read) == (None, (Causal(), padding), (Causal(), padding))


def test_a_flag_says_nothing_but_a_diagonal() -> None:
    padding = KeyPadding(condition=ix.as_bool(MASKS_PADDING))
    other = MaskSpec(kinds=(padding,), flag=Flag.CALLED)
    assert (other.flagged, other.held) == (None, (padding,))


SCATTERED = ix.invert(Load("scattered", (B, Q, K), "bool"))
CHOSEN = Chosen(tensor="top", at=(B, Q), count=2, distinct=True, condition=SCATTERED)
ROWS = torch.tensor([[[0, 3], [1, 1]], [[2, 0], [3, 2]]])


def test_a_query_has_the_keys_of_its_row() -> None:
    inputs = Inputs(seqlen_q=2, seqlen_kv=4, load=lambda name, at: int(ROWS[at].item()))
    found = [[[k for k in range(4) if names(CHOSEN, b, 0, q, k, inputs)] for q in range(2)] for b in range(2)]
    assert found == [[[0, 3], [1]], [[0, 2], [2, 3]]]


def test_a_number_may_name_a_block_of_keys() -> None:
    inputs = Inputs(seqlen_q=2, seqlen_kv=16, load=lambda name, at: int(ROWS[at].item()))
    chosen = dataclasses.replace(CHOSEN, block=3)
    assert [k for k in range(16) if names(chosen, 0, 0, 0, k, inputs)] == [0, 1, 2, 9, 10, 11]
    assert chosen.words == "top[b, q, :], in blocks of 3"


def test_a_row_of_symbolic_length() -> None:
    inputs = Inputs(seqlen_q=2, seqlen_kv=4, load=lambda name, at: int(ROWS[at].item()), sizes={"s3": 1})
    chosen = dataclasses.replace(CHOSEN, count="s3")
    assert [k for k in range(4) if names(chosen, 1, 0, 1, k, inputs)] == [3]
    with pytest.raises(LookupError, match="s4"):
        names(dataclasses.replace(CHOSEN, count="s4"), 1, 0, 1, 3, inputs)


def test_words_and_what_is_read() -> None:
    assert CHOSEN.words == "top[b, q, :]"
    assert dataclasses.replace(CHOSEN, at=(Const(0),)).words == "top[0, :]"
    assert reads.tensors(CHOSEN) == {"top", "scattered"}


def test_a_spec_holds_it() -> None:
    dense = Dense(shape=(2, 1, 128, 128), dtype="bool")
    spec = make_spec(mask=MaskSpec(kinds=(Causal(),), dense=dense, reason="not read", chosen=CHOSEN))
    assert AttentionSpec.from_text(spec.to_text()) == spec
    assert spec.mask.conditions == (Causal(), CHOSEN)


READS_LENGTH = Load("length", (B,), "int")
READS_PADDING = ix.as_bool(Load("attention_mask", (B, Load("order", (K,), "int")), "int"))


@pytest.mark.parametrize(
    ("kind", "tensors", "sizes"),
    [
        (masks.Causal(), set(), set()),
        (masks.CausalFrom(offset=ix.add(Size("s1"), READS_LENGTH)), {"length"}, {"s1"}),
        (masks.KeyPadding(condition=READS_PADDING), {"attention_mask", "order"}, set()),
        (masks.Chunked(size=4, start=READS_LENGTH), {"length"}, set()),
        (masks.AnyOf(alternatives=((masks.Causal(),), (masks.KeyPadding(condition=READS_PADDING),))), {"attention_mask", "order"}, set()),
        (added_scores.RelativeBias(table="table", at=(ix.add(K, Q, -1), H), distance=ix.add(K, Q, -1)), {"table"}, set()),
        (added_scores.Bias(tensor="bias", at=(READS_LENGTH, Size("s2")), shape=(1, 1, 1, 1)), {"bias", "length"}, {"s2"}),
    ],
)  # fmt: skip
def test_what_a_kind_reads(kind: MaskKind | ProvedScore, tensors: set[str], sizes: set[str]) -> None:
    assert reads.tensors(kind) == tensors
    assert reads.sizes(kind) == sizes
    assert reads.names(kind) == tensors | sizes


def test_what_an_expression_reads() -> None:
    assert reads.names_in(ix.add(READS_LENGTH, Size("s3"))) == {"length", "s3"}
