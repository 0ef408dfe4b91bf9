from __future__ import annotations

import pytest

from attn_compiler.spec import scores
from attn_compiler.spec.scores import DenseBias, ScoreSpec, Sinks, Softcap, Unusual
from tests.spec.test_added_scores import PROVED

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
