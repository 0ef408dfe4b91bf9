"""Changes of scores, added tensors, and the numbers of dims."""

from __future__ import annotations

import dataclasses

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Index, Load
from attn_compiler.spec import added_scores, dims, scores
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
from attn_compiler.spec.attention import Dim, SizeRange
from attn_compiler.spec.scores import DenseBias, ScoreSpec, Sinks, Softcap, Unusual
from tests.lowerings.specs import make_spec
from tests.spec.meanings import Inputs, adds

BIAS = DenseBias(shape=(1, 8, "s0", "s0"), dtype="bfloat16")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Softcap(cap=50.0), "softcap 50"),
        (Sinks(requires_grad=True), "sinks"),
        (BIAS, "bias[1, 8, s0, s0] with gradient"),
        (Unusual(what="tanh after a mask"), "tanh after a mask"),
    ],
)
def test_words_of_a_change(change: scores.ScoreChange, words: str) -> None:
    assert change.words == words


def test_every_change_is_tested_above() -> None:
    tested = {type(case[0]) for case in test_words_of_a_change.pytestmark[0].args[1]}
    assert tested == set(scores.KINDS)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (ScoreSpec(scale=0.125), "scale 0.125"),
        (ScoreSpec(scale=1 / 3), "scale 0.333333"),
        (ScoreSpec(scale=1.0, runtime_scale=True), "scale 1 × run-time factor"),
        (ScoreSpec(scale=1.0, changes=(Softcap(cap=30.0), BIAS)), f"scale 1, softcap 30, {BIAS.words}"),
        (ScoreSpec(scale=1.0, dropout_p=0.1), "scale 1, dropout 0.1"),
    ],
)
def test_words(spec: ScoreSpec, words: str) -> None:
    assert spec.words == words


def test_changes_by_their_kind() -> None:
    sinks = Sinks(requires_grad=False)
    spec = ScoreSpec(scale=1.0, changes=(Softcap(cap=30.0), sinks, BIAS))
    assert (spec.softcap, spec.sinks, spec.bias) == (30.0, sinks, BIAS)
    plain = ScoreSpec(scale=1.0)
    assert (plain.softcap, plain.sinks, plain.bias) == (None, None, None)


# ---- proved kinds -------------------------------------------------------------------------------------------------


def test_what_is_added() -> None:
    spec = ScoreSpec(scale=1.0, proved=(PROVED[0][0], PROVED[5][0]))
    assert spec.added == "ALiBi slopes[h] · (k - q) + -100 between regions"
    assert spec.words == "scale 1"
    assert ScoreSpec(scale=1.0).added is None
    by_highest = ScoreSpec(scale=1.0, proved=(PROVED[0][0],), by_highest=True)
    assert by_highest.added == "ALiBi slopes[h] · (k - q), whose highest number masks the others (proved)"


# Proved kinds.
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


@pytest.mark.parametrize(
    ("dim", "bound"),
    [
        (0, 0),
        (7, 7),
        ("s0", 2),
        ("s77", 2),
        ("u0", 0),
        ("s0 + s1", 4),
        ("s0 + 1", 3),
        ("u0 + 1", 1),
        ("s0 - 1", 1),
        ("s0 - 3", 0),
        ("2*s0", 4),
        ("3*s0 + 3*s1", 12),
        ("(s0//2)", 1),
        ("(s0//4)", 0),
        ("(((s0 - 1)//2)) + 1", 1),
        ("-s0 + s1", 0),
        ("-s0 + s1 + 1", 0),
        ("s0 - s1", 0),
        ("Mod(s0, 8)", 0),
        ("s0**2", 0),
    ],
)
def test_at_least(dim: Dim, bound: int) -> None:
    assert dims.at_least(dim) == bound


def test_equal_names_are_equal_sizes_and_nothing_else_is() -> None:
    assert dims.same("s0", "s0")
    assert dims.same(4, 4)
    assert not dims.same("s0", "s1")
    assert not dims.same("s0", 4)


@pytest.mark.parametrize(
    ("dim", "of", "known"),
    [
        (64, 8, True),
        (0, 8, True),
        (36, 8, False),
        ("64*s0", 8, True),
        ("64*s0", 128, False),
        ("8*s0*s1", 8, True),
        ("4*s0*s1", 8, False),
        ("64*s0 + 128", 8, True),
        ("64*s0 + 4", 8, False),
        ("64*s0 - 64", 64, True),
        ("-64*s0 + 64*s1", 8, True),
        ("s0", 1, True),
        ("s0", 2, False),
        ("8*(s0//8)", 8, True),
        ("Max(8, 64*s0)", 8, False),
    ],
)
def test_is_multiple(dim: Dim, of: int, known: bool) -> None:
    assert dims.is_multiple(dim, of) == known


def test_a_symbol_can_have_every_remainder() -> None:
    assert dims.can_have_remainder(192, modulus=128, remainder=64)
    assert not dims.can_have_remainder(128, modulus=128, remainder=64)
    assert dims.can_have_remainder("s0", modulus=128, remainder=64)


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((2, 1, "s0", 7), True),
        (("s0", 7), True),
        ((1,), True),
        ((), True),
        ((4, "s0", 7), True),
        ((3, 1, "s0", 7), False),
        ((2, 1, "s1", 7), False),
        ((1, 2, 1, "s0", 7), False),
    ],
)
def test_broadcasts(shape: tuple[Dim, ...], fits: bool) -> None:
    assert dims.broadcasts(shape, (2, 4, "s0", 7)) == fits


@pytest.mark.parametrize(
    ("dim", "found"),
    [
        (7, (7, 7)),
        ("s0", (2, None)),
        ("s1", (2, 512)),
        ("8*s2", (16, None)),
        ("s3", (1024, None)),
        ("u0", (0, 64)),
    ],
)
def test_the_range_of_a_size_of_a_spec(dim: Dim, found: tuple[int, int | None]) -> None:
    ranges = (
        SizeRange(size="s1", least=0, most=512),
        SizeRange(size="s3", least=1024),
        SizeRange(size="u0", least=0, most=64),
    )
    assert dims.range_of(dataclasses.replace(make_spec(), ranges=ranges), dim) == found
