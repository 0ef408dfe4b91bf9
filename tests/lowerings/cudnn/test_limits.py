"""What cuDNN's own graphs refuse by what they are told, and when keys are counted for them."""

from __future__ import annotations

from typing import Any

import pytest

from attn_compiler.lowerings.cudnn import limits
from attn_compiler.lowerings.cudnn.plan import CudnnCall
from attn_compiler.spec.target import Target
from tests.lowerings.specs import make_spec, words

TRAINING = CudnnCall(scale=0.125, needs_grad=True)
OF_64: dict[str, Any] = {"seqlen_q": 192, "seqlen_kv": 192}


def said(call: CudnnCall, target: Target, **spec: Any) -> str:
    return words(limits.check_graph(call, make_spec(**spec), target))


@pytest.mark.parametrize("call", [TRAINING, CudnnCall(scale=1.0, left=31, right=0), CudnnCall(scale=1.0, lengths=True)])
def test_plain_lengths_are_served(call: CudnnCall) -> None:
    assert said(call, Target.fake()) == ""


@pytest.mark.parametrize("keys", [100, "s0"])
@pytest.mark.parametrize(("cudnn", "refused"), [(91_500, True), (91_501, False)])
def test_keys_off_128_want_a_cudnn_without_the_bug(keys: int | str, cudnn: int, refused: bool) -> None:
    found = said(TRAINING, Target.fake(cudnn=cudnn), seqlen_q=128, seqlen_kv=keys)
    assert ("issues/169849" in found) is refused


@pytest.mark.parametrize(
    ("sides", "refused"),
    [
        ({"left": 31}, True),
        ({"left": 31, "right": 4}, True),
        ({"left": 31, "right": 0}, False),
        ({"right": 4}, False),
    ],
)
def test_only_a_window_without_a_diagonal_meets_the_bug_of_windows(sides: dict[str, int], refused: bool) -> None:
    call = CudnnCall(scale=1.0, **sides)
    assert ("for a window that is not causal" in said(call, Target.fake(cudnn=91_400))) is refused
    assert "window" not in said(call, Target.fake(cudnn=91_500))


@pytest.mark.parametrize("call", [TRAINING, CudnnCall(scale=1.0, needs_grad=True, bias=True, right=0)])
def test_where_nothing_bounds_the_keys_a_gradient_may_be_nan(call: CudnnCall) -> None:
    assert "dQ can be NaN" in said(call, Target.fake(), **OF_64)
    assert said(call, Target.fake(), needs_grad=False, **OF_64) == ""
    assert said(call, Target.fake(cudnn=92_600), **OF_64) == ""


@pytest.mark.parametrize(
    "bounded",
    [
        CudnnCall(scale=1.0, needs_grad=True, right=0),
        CudnnCall(scale=1.0, needs_grad=True, left=9),
        CudnnCall(scale=1.0, needs_grad=True, lengths=True),
        CudnnCall(scale=1.0, needs_grad=True, lengths=True, bias=True),
    ],
)
def test_a_band_or_lengths_make_cudnn_look_at_the_last_key(bounded: CudnnCall) -> None:
    assert said(bounded, Target.fake(), **OF_64) == ""


def test_with_a_bias_the_queries_are_watched_too() -> None:
    sizes: dict[str, Any] = {"seqlen_q": 192, "seqlen_kv": 256}
    assert said(TRAINING, Target.fake(), **sizes) == ""
    assert "dQ can be NaN" in said(CudnnCall(scale=1.0, needs_grad=True, bias=True), Target.fake(), **sizes)


def test_keys_are_counted_only_where_nothing_else_bounds_them() -> None:
    spec = make_spec(**OF_64)
    counted = limits.counted(TRAINING, spec, Target.fake())
    assert (counted.lengths, counted.counted, counted.may_be_empty) == (True, True, False)
    assert said(counted, Target.fake(), **OF_64) == ""
    for call in (CudnnCall(scale=1.0, needs_grad=True, right=0), CudnnCall(scale=1.0, needs_grad=True, lengths=True)):
        assert limits.counted(call, spec, Target.fake()) is call
    assert limits.counted(TRAINING, make_spec(), Target.fake()) is TRAINING
    assert limits.counted(TRAINING, spec, Target.fake(cudnn=92_600)) is TRAINING


@pytest.mark.parametrize(("cudnn", "refused"), [(0, False), (90_000, True), (91_299, True), (91_300, False)])
def test_the_first_cudnn_with_graphs(cudnn: int, refused: bool) -> None:
    """None at all, or one before 9.0, is another refusal's."""
    found = words(limits.check_graph_version(Target.fake(cudnn=cudnn)))
    assert ("cuDNN 9.13.0 or newer for graphs of our own" in found) is refused
    assert bool(found) is refused
