from __future__ import annotations

import dataclasses

import pytest
import torch

from attn_compiler import DelayedScaling, Fp8Recipe, fp8_state_dict
from benchmarks import fp8_learning
from benchmarks.documentation import Text
from benchmarks.fp8_learning import Job, Learner, Run, Way, rate
from benchmarks.fp8_learning_rows import ORDER
from benchmarks.fp8_training import EMULATED, WINDOW

_TEXT = Text(
    learnt=b"".join(b"The %d. sentence is about %d things. " % (i, i * i) for i in range(600)),
    held_out=b"A sentence is about nothing. " * 20,
    packages=("none",),
)
_SETUP = dataclasses.replace(EMULATED, hidden=32, layers=1, batch=2, length=64)
_PLAIN = Way(name="bfloat16", lowering="untouched")
_DELAYED = Way(name="delayed", lowering="reference_fp8", recipe=Fp8Recipe(scaling=DelayedScaling()))


def test_a_model_learns_again_from_the_beginning() -> None:
    pytest.importorskip("transformers")
    learner = Learner(_DELAYED, _SETUP)
    first, other, again = (learner.learn(_TEXT, seed, 2 * WINDOW) for seed in (0, 1, 0))
    assert first.losses == again.losses
    assert first.losses != other.losses
    assert first.held_out == again.held_out
    assert first.losses[-1] < 0.85 * first.losses[0]
    assert first.lowerings == "reference_fp8"
    assert "FP8 forward" in first.note
    assert any(bool(x.any()) for x in fp8_state_dict().values())


def test_all_ways_begin_alike_and_see_the_same() -> None:
    pytest.importorskip("transformers")
    usual, found = (Learner(way, _SETUP).learn(_TEXT, 3, WINDOW) for way in (_PLAIN, _DELAYED))
    assert usual.lowerings == "untouched"
    assert found.losses[0] == pytest.approx(usual.losses[0], rel=1e-2)
    assert found.losses != usual.losses


def test_a_text_is_seen_once() -> None:
    rows = fp8_learning._in_rows(_TEXT.learnt, _SETUP)
    order = torch.randperm(len(rows))
    seen = torch.cat([fp8_learning._rows(order, step, _SETUP.batch) for step in range(len(rows) // _SETUP.batch)])
    assert len(seen.unique()) == len(seen)


def test_the_rate_rises_and_falls() -> None:
    rates = [rate(step, 600) for step in range(600)]
    peak = rates.index(max(rates))
    assert peak in (fp8_learning.WARMUP - 1, fp8_learning.WARMUP)
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert 0 < rates[-1] < 0.01 * rates[peak]


def test_a_way_that_fails_leaves_the_others_alone() -> None:
    pytest.importorskip("transformers")
    job = Job(way=_PLAIN, setup=_SETUP, seeds=(0,), steps=WINDOW, deadline=float("inf"))
    broken = dataclasses.replace(job, way=Way(name="broken", lowering="nowhere"))
    text, *found = fp8_learning.learnt([broken, job], lambda: _TEXT, at_a_time=1)
    assert text == _TEXT
    runs = [run for run in found if isinstance(run, Run)]
    assert [(run.way, run.seed, len(run.losses)) for run in runs] == [("bfloat16", 0, WINDOW)]
    assert [words for words in found if isinstance(words, str) and words.startswith("broken: InvalidOption")]


def test_every_way_has_its_place_in_tables() -> None:
    assert tuple(way.name for way in fp8_learning.WAYS) == ORDER
    assert {way.name for way in fp8_learning.EMULATED_WAYS} <= set(ORDER)
