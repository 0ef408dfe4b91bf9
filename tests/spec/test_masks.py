from __future__ import annotations

import dataclasses

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load
from attn_compiler.spec import mask_kinds, masks
from attn_compiler.spec.masks import Causal, Dense, Flag, Formula, KeyPadding, MaskSpec

B, Q, K = map(Index, "bqk")
PADDING = Load("padding", (B, K), "int")


def test_every_kind_is_had_from_here() -> None:
    kinds = (*mask_kinds.KINDS, mask_kinds.Dense)
    assert [kind for kind in kinds if getattr(masks, kind.__name__, None) is not kind] == []


def test_words_of_a_mask() -> None:
    dense = Dense(shape=(1,), dtype="bool")
    assert MaskSpec().words == "none"
    assert MaskSpec(kinds=(Causal(),), flag=Flag.CALLED, dense=dense).words == "causal ∧ dense bool[1]"
    assert MaskSpec(kinds=(Causal(),), flag=Flag.READ).words == "causal (proved)"
    proved = MaskSpec(kinds=(Causal(), KeyPadding(condition=ix.as_bool(PADDING))), dense=dense)
    assert proved.words == "causal ∧ key padding padding[b, k] (proved), as dense bool[1]"
    assert MaskSpec(kinds=(Causal(),)).words == "causal (proved), within the bias"
    assert proved.formula == "k <= q ∧ padding[b, k] ≠ 0"
    assert MaskSpec(dense=dense, reason="it is not in the graph").formula is None


def test_words_of_a_mask_that_was_read_in_part() -> None:
    dense = Dense(shape=(2, 1, 5, 7), dtype="bool")
    rest = Formula(condition=ix.invert(Load("chosen", (B, Q, K), "bool")))
    mask = MaskSpec(kinds=(Causal(), KeyPadding(condition=ix.as_bool(PADDING))), dense=dense, reason="not read")
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
    dense, padding = Dense(shape=(1,), dtype="bool"), KeyPadding(condition=ix.as_bool(PADDING))
    called = MaskSpec(kinds=(Causal(), padding), flag=Flag.CALLED, dense=dense)
    assert (called.flagged, called.held, called.read) == (Causal(), (padding,), (padding,))
    read = MaskSpec(kinds=(Causal(),), flag=Flag.READ)
    assert (read.flagged, read.held, read.read) == (Causal(), (), (Causal(),))
    within = MaskSpec(kinds=(Causal(), padding), dense=dense)
    assert (within.flagged, within.held, within.read) == (None, (Causal(), padding), (Causal(), padding))


def test_a_flag_says_nothing_but_a_diagonal() -> None:
    padding = KeyPadding(condition=ix.as_bool(PADDING))
    other = MaskSpec(kinds=(padding,), flag=Flag.CALLED)
    assert (other.flagged, other.held) == (None, (padding,))
