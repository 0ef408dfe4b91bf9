from __future__ import annotations

import dataclasses

import pytest
import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Index, Load
from attn_compiler.spec import reads
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.chosen_keys import Chosen
from attn_compiler.spec.masks import Causal, Dense, MaskSpec
from tests.lowerings.specs import make_spec
from tests.spec.meanings import Inputs, names

B, Q, K = map(Index, "bqk")
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
