"""What packages that are not installed would gain: read off the measured rows, and told where their lowering would take the site."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from attn_compiler.lowerings.choice import packages, priorities
from attn_compiler.options.options import Options
from attn_compiler.passes.writing import select
from attn_compiler.spec.target import Target
from benchmarks import select_cases

WINDOW = select_cases.spec_of(select_cases.BY_NAME["window_d64_s8192"], training=True)
BOTH = {"flash_attn_4": "4.0.0b36", "cudnn_frontend": "1.23.0"}


def _faster(spec: Any, **machine: str) -> Any:
    target = Target.fake(**machine)
    return select.faster(spec, target, select.decide(spec, target, Options()))


def test_a_site_is_told_what_would_be_faster_and_how_much() -> None:
    found = _faster(WINDOW)
    row = priorities.row_of(WINDOW, Target.fake())
    assert row is not None
    assert (found.lowering, found.install) == ("fa4", "pip install 'attn_compiler[fa4]'")
    assert found.speed == pytest.approx(row.times["hopper"] / row.times["fa4"])
    assert found.since == row.since
    assert "times as fast" in found.words


@pytest.mark.parametrize(
    ("change", "machine"),
    [
        ({}, BOTH),
        ({"dtype": "float32"}, {}),
        ({"has_dropout": True}, {}),
    ],
    ids=["it is installed", "not measured in that dtype", "it does not take dropout"],
)
def test_nothing_is_told_where_the_package_would_change_nothing(
    change: dict[str, Any], machine: dict[str, str]
) -> None:
    spec = WINDOW
    if change.get("dtype"):
        spec = dataclasses.replace(
            spec,
            **{name: dataclasses.replace(getattr(spec, name), dtype="float32") for name in "qkv"},
            out_dtype="float32",
        )
    if change.get("has_dropout"):
        spec = dataclasses.replace(spec, score=dataclasses.replace(spec.score, dropout_p=0.1))
    assert _faster(spec, **machine) is None


def test_a_lowering_that_refuses_for_another_reason_is_not_advised() -> None:
    # FlashAttention-4 wants its head dims to be multiples of 8.
    head_dim = 60
    odd = {
        name: dataclasses.replace(getattr(WINDOW, name), shape=(*getattr(WINDOW, name).shape[:3], head_dim))
        for name in "qkv"
    }
    found = _faster(dataclasses.replace(WINDOW, **odd))
    assert found is None or found.lowering != "fa4"


def test_what_has_no_measured_times_has_nothing_faster() -> None:
    for machine in (Target.fake(device="cpu"), Target.fake(sm=80)):
        assert packages.faster(WINDOW, machine, "triton") == []
    assert packages.faster(WINDOW, Target.fake(), "untouched") == []


def test_a_package_stands_for_the_classes_where_it_is_first() -> None:
    flash, cudnn = (packages.standing(package, 90) for package in packages.PACKAGES)
    assert flash is not None
    assert cudnn is not None
    assert 0 < cudnn.first < flash.first < flash.classes == cudnn.classes
    assert 1.03 <= flash.speed < 2
    assert packages.standing(packages.PACKAGES[0], 80) is None


def test_a_version_that_is_advised_is_one_that_the_lowering_takes() -> None:
    from attn_compiler.lowerings import by_name

    for package in packages.PACKAGES:
        assert by_name(package.lowering).unavailable(Target.fake())
        assert not by_name(package.lowering).unavailable(package.installed(Target.fake()))
