"""Proved kinds: words, and references."""

from __future__ import annotations

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Index, Load
from attn_compiler.spec import added_scores
from attn_compiler.spec.added_scores import (
    Alibi,
    Bias,
    BiasFormula,
    GatheredBias,
    LogBuckets,
    Penalty,
    RegionPenalty,
    RelativeBias,
)
from tests.spec.meanings import Inputs, adds

B, H, Q, K = map(Index, "bhqk")


DISTANCE = ix.add(K, Q, -1)


T5 = LogBuckets(count=8, max_distance=20, both_ways=True)


SLOPE = Load("slopes", (H,), "float")


LATER = ix.compare(">", K, Q)


#: a kind, its words, and what it adds to the score (1, 1, 2, 5) where every run-time element is the sum of its indices
PROVED: list[tuple[added_scores.ProvedScore, str, float]] = [
    (Alibi(slopes=SLOPE, position=DISTANCE), "ALiBi slopes[h] · (k - q)", 3.0),
    (
        Alibi(slopes=ix.apply("pow", Const(2.0), ix.as_float(H)), position=K, requires_grad=True),
        "ALiBi slopes(h) · k with gradient",
        10.0,
    ),
    (
        RelativeBias(table="table", at=(DISTANCE, H), distance=DISTANCE, buckets=T5),
        "T5 relative bias (8 buckets up to 20, both ways) table[bucket(k - q), h]",
        4.0,
    ),
    (
        RelativeBias(table="table", at=(H, DISTANCE), distance=DISTANCE, weight=0.5, requires_grad=True),
        "relative bias 0.5 · table[h, f(k - q)] with gradient",
        2.0,
    ),
    (
        GatheredBias(table="table", at=(Load("index", (Q, K), "int"), H), weight=2.0),
        "gathered bias 2 · table[index[q, k], h]",
        16.0,
    ),
    (RegionPenalty(value=-100.0, of_key=ix.apply("floordiv", K, Const(4))), "-100 between regions", -100.0),
    (Penalty(value=-1000.0, condition=LATER), "-1000 where q + 1 <= k", -1000.0),
    (Bias(tensor="bias", at=(H, K), shape=(1, 4, 1, "s0")), "bias bias[1, 4, 1, s0] over h, k", 6.0),
    (Bias(tensor="one", at=(Const(3),), shape=(1, 1, 1, 1)), "bias one[1, 1, 1, 1] one number", 3.0),
    (BiasFormula(value=ix.as_float(ix.mul(DISTANCE, Const(2)))), "bias float(2·k - 2·q)", 6.0),
]


@pytest.mark.parametrize(("kind", "words", "added"), PROVED)
def test_words_and_reference_of_a_proved_kind(kind: added_scores.ProvedScore, words: str, added: float) -> None:
    assert kind.words == words
    inputs = Inputs(seqlen_q=4, seqlen_kv=8, load=lambda _, at: sum(at))
    assert adds(kind, 1, 1, 2, 5, inputs) == added


def test_every_proved_kind_is_tested_above() -> None:
    assert {type(kind) for kind, _, _ in PROVED} == set(added_scores.PROVED_KINDS)


def test_no_penalty_where_its_condition_does_not_hold() -> None:
    inputs = Inputs(seqlen_q=4, seqlen_kv=8)
    assert adds(Penalty(value=-1000.0, condition=LATER), 0, 0, 2, 2, inputs) == 0.0
    assert adds(RegionPenalty(value=-1.0, of_key=ix.apply("floordiv", K, Const(4))), 0, 0, 2, 3, inputs) == 0.0


def test_axes_that_a_bias_varies_along() -> None:
    part = ix.apply("mod", B, Const(4))
    assert Bias(tensor="bias", at=(part, Const(0), Q), shape=(8, 1, 4, 1)).varies_along == "bq"


def test_buckets_backwards_share_one_for_all_later_keys() -> None:
    backwards = LogBuckets(count=8, max_distance=20, both_ways=False)
    assert [backwards.bucket(d) for d in (5, 1, 0, -1, -3, -4, -100)] == [0, 0, 0, 1, 3, 4, 7]
    assert [T5.bucket(d) for d in (0, 1, -1, 2, -2, 100, -100)] == [0, 5, 1, 6, 2, 7, 3]
