from __future__ import annotations

import dataclasses

import pytest

from attn_compiler.lowerings.fa4 import plan
from attn_compiler.lowerings.fa4.plan import Fa4Call
from attn_compiler.spec.masks import Causal, Dense, MaskSpec, SlidingWindow
from attn_compiler.spec.scores import Sinks, Softcap
from tests.lowerings.specs import BOTTOM_RIGHT, CAUSAL, make_spec


def windowed(left: int | None, right: int | None, *further: Causal) -> MaskSpec:
    window = SlidingWindow(left=left, right=right)
    return MaskSpec(kinds=(window, *further), dense=Dense(shape=(2, 1, 128, 128), dtype="bool"))


@pytest.mark.parametrize(
    ("mask", "causal", "window"),
    [
        (MaskSpec(), False, (None, None)),
        (CAUSAL, True, (None, None)),
        (BOTTOM_RIGHT, True, (None, None)),
        (windowed(31, None, Causal()), False, (31, 0)),
        (windowed(31, 16), False, (31, 16)),
        (windowed(None, 0), True, (None, None)),
        (windowed(None, 5), False, (None, 5)),
        (windowed(31, None), False, (31, None)),
        # Beyond every key.
        (windowed(127, None, Causal()), True, (None, None)),
        (windowed(126, None, Causal()), False, (126, 0)),
        (windowed(4096, 127), False, (None, None)),
    ],
)
def test_masks(mask: MaskSpec, causal: bool, window: tuple[int | None, int | None]) -> None:
    settings = plan.of(make_spec(mask=mask))
    assert (settings.causal, settings.window) == (causal, window)


def test_a_window_stays_where_lengths_are_not_known() -> None:
    settings = plan.of(make_spec(mask=windowed(4096, None, Causal()), seqlen_q="s0", seqlen_kv="s0"))
    assert settings.window == (4096, 0)


@pytest.mark.parametrize(
    ("learned", "training", "grad"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_scores(learned: bool, training: bool, grad: bool) -> None:
    spec = make_spec(changes=(Softcap(cap=30.0), Sinks(requires_grad=learned)), scale=0.5, needs_grad=training)
    settings = plan.of(spec)
    assert (settings.scale, settings.softcap, settings.sinks, settings.sinks_grad) == (0.5, 30.0, True, grad)
    assert not plan.of(make_spec()).sinks


def test_text_and_back() -> None:
    call = Fa4Call(spec=make_spec(mask=windowed(31, 16)), version="4.0.0b36", sm=90, deterministic=True)
    assert Fa4Call.from_text(call.to_text()) == call
    for other in ({"version": "4.0.0b35"}, {"sm": 100}, {"deterministic": False}):
        assert dataclasses.replace(call, **other).to_text() != call.to_text()  # type: ignore[arg-type]
