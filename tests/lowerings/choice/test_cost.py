"""The model of cost: pure, of the sign that was measured on sm90, and what the rows of other machines rest on."""

from __future__ import annotations

import csv
import dataclasses
import functools
from collections.abc import Iterator

import pytest

from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target
from benchmarks import bench_select, select_cases
from tests.lowerings.choice import cost
from tests.lowerings.specs import CAUSAL, dense, make_spec

H200 = Target.fake()
PYTORCHS = ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient")
#: sorts of measured cases in which a tensor joins the scores
WITH_TENSOR = ("padded", "lengths", "window")


@functools.cache
def _measured() -> dict[tuple[str, str, str], float]:
    """(case, pass, side) -> microseconds."""
    with bench_select.RESULTS.open(newline="") as file:
        return {(x["case"], x["pass"], x["side"]): float(x["p50_us"]) for x in csv.DictReader(file) if x["p50_us"]}


@functools.cache
def spec_of(name: str, training: bool) -> AttentionSpec:
    """Of a measured case."""
    return select_cases.spec_of(select_cases.BY_NAME[name], training=training)


def _modelled(side: str, name: str, which: str) -> float:
    forward, both = (cost.seconds(side, spec_of(name, training), H200) for training in (False, True))
    assert forward is not None
    assert both is not None
    return forward if which == "forward" else both - forward


def _pairs(*sorts: str) -> Iterator[tuple[str, str, str, float, float]]:
    """(case, pass, kernel of PyTorch's, its time over ours as it was measured, and as it is modelled)."""
    for (name, which, side), time in _measured().items():
        ours = _measured().get((name, which, "triton"))
        if side in PYTORCHS and ours is not None and name in select_cases.BY_NAME and name.startswith(sorts):
            yield name, which, side, time / ours, _modelled(side, name, which) / _modelled("triton", name, which)


def test_where_the_model_says_that_ours_is_faster_it_was_measured_to_be() -> None:
    said = [pair for pair in _pairs(*WITH_TENSOR) if pair[4] > 1]
    assert [pair for pair in said if pair[3] <= 1] == []
    assert len(said) > 80


def test_with_a_tensor_the_model_misses_cudnn_without_a_diagonal_alone() -> None:
    """It counts less for cuDNN's mask than it was measured to take."""
    missed = [pair for pair in _pairs(*WITH_TENSOR) if pair[3] > 1 >= pair[4]]
    assert {(name.split("_d")[0], side) for name, _, side, *_ in missed} == {
        ("padded", "sdpa_cudnn"),
        ("lengths", "sdpa_cudnn"),
    }


def test_without_a_tensor_the_sign_is_that_of_the_measurement_but_where_they_are_alike() -> None:
    pairs = list(_pairs("causal", "full"))
    wrong = [pair for pair in pairs if (pair[3] > 1) != (pair[4] > 1) and not 0.8 < pair[3] < 1.25]
    assert wrong == []
    assert len(pairs) > 150


def test_a_machine_lowering_or_site_that_it_says_nothing_of() -> None:
    spec = make_spec()
    assert cost.seconds("triton", spec, Target.fake(sm=75)) is None
    assert cost.seconds("hopper", spec, H200) is None
    assert cost.seconds("triton", make_spec(dtype="float32"), H200) is None
    assert cost.seconds("triton", make_spec(head_dim="s0"), H200) is None
    assert cost.seconds("triton", make_spec(head_dim=512), H200) is None
    assert cost.cheapest(("hopper",), spec, H200) is None


def test_twice_the_heads_take_twice_as_long_and_a_backward_takes_more() -> None:
    spec = make_spec(needs_grad=False, mask=dense(2, 1, 128, 128))
    one, two = (cost.seconds("sdpa_cudnn", make_spec(needs_grad=False, mask=spec.mask, heads=h), H200) for h in (8, 16))
    both = cost.seconds("sdpa_cudnn", dataclasses.replace(spec, needs_grad=True), H200)
    assert one is not None
    assert two == pytest.approx(2 * one)
    assert both is not None
    assert both > 2 * one
    # A mask of truth values over keys costs ours nothing for a pair, a diagonal halves its pairs.
    keys = cost.seconds("triton", make_spec(needs_grad=False, mask=dense(2, 1, 1, 128)), H200)
    assert keys == cost.seconds("triton", make_spec(needs_grad=False), H200)
    assert cost.seconds("triton", make_spec(needs_grad=False, mask=CAUSAL), H200) == pytest.approx(keys * 129 / 256)  # type: ignore[operator]
