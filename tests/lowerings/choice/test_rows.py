"""Which sites a row of the order is for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from attn_compiler.lowerings.choice.rows import Row
from attn_compiler.spec.attention import SizeRange
from attn_compiler.spec.target import Target
from tests.lowerings.specs import dense, make_spec

H200 = Target.fake()
ROW = Row(sms=(90, 90), order=("triton",), since="2026-11-23", why="a test")


@pytest.mark.parametrize(
    ("bounds", "spec", "fits"),
    [
        ({}, {}, True),
        ({"dtypes": ("float16",)}, {}, False),
        ({"training": True}, {"needs_grad": True}, True),
        ({"training": True}, {"needs_grad": False}, False),
        ({"most_queries": 16}, {"seqlen_q": 16}, True),
        ({"most_queries": 16}, {"seqlen_q": 17}, False),
        ({"most_queries": 16}, {"seqlen_q": "s0"}, False),
        ({"most_queries": 16}, {"seqlen_q": "s0", "ranges": (SizeRange(size="s0", least=2, most=16),)}, True),
        ({"least_scores": 64 * 64}, {"seqlen_q": 64, "seqlen_kv": 64}, True),
        ({"least_scores": 64 * 64}, {"seqlen_q": 64, "seqlen_kv": 63}, False),
        ({"most_scores": 64 * 64}, {"seqlen_q": 64, "seqlen_kv": 65}, False),
        ({"least_scores": 4096 * 128}, {"seqlen_q": "s0"}, True),
        ({"least_scores": 4096 * 128 + 1}, {"seqlen_q": "s0"}, False),
        ({"least_scores": 513 * 128}, {"seqlen_q": "s0", "ranges": (SizeRange(size="s0", least=2, most=512),)}, False),
        ({"seqlens": (64, 511)}, {"seqlen_q": 64, "seqlen_kv": 511}, True),
        ({"seqlens": (64, 511)}, {"seqlen_q": 63, "seqlen_kv": 511}, False),
        ({"seqlens": (64, 511)}, {"seqlen_q": 64, "seqlen_kv": 512}, False),
        ({"seqlens": (64, None)}, {"seqlen_q": 64, "seqlen_kv": 1 << 20}, True),
        ({"seqlens": (64, None)}, {"seqlen_kv": "s0"}, True),
        ({"seqlens": (1024, 4095)}, {"seqlen_q": "s0", "seqlen_kv": "s0"}, False),
        ({"seqlens": (4096, None)}, {"seqlen_q": "s0", "seqlen_kv": "s0"}, True),
        ({"mask": "full"}, {}, True),
        ({"mask": "padding"}, {}, False),
        ({"parts": frozenset({"bias", "mask"})}, {"mask": dense(2, 1, 128, 128)}, True),
        ({"parts": frozenset({"bias", "mask"})}, {}, False),
    ],
)
def test_every_field_that_is_said_has_to_hold(bounds: dict[str, Any], spec: dict[str, Any], fits: bool) -> None:
    made = dataclasses.replace(
        make_spec(**{k: x for k, x in spec.items() if k != "ranges"}), ranges=spec.get("ranges", ())
    )
    assert dataclasses.replace(ROW, **bounds).fits(made, H200) is fits


@pytest.mark.parametrize("bounds", [{"least_scores": 1}, {"most_scores": 1 << 40}, {"seqlens": (1, None)}])
def test_on_a_cpu_a_length_that_is_not_known_is_within_no_bounds(bounds: dict[str, Any]) -> None:
    row, cpu = dataclasses.replace(ROW, sms=None, **bounds), Target.fake(device="cpu")
    assert row.fits(make_spec(device="cpu"), cpu)
    assert not row.fits(make_spec(device="cpu", seqlen_kv="s0"), cpu)


@pytest.mark.parametrize(
    ("sms", "machine", "fits"),
    [
        ((90, 90), Target.fake(sm=90), True),
        ((90, 90), Target.fake(sm=89), False),
        ((80, 90), Target.fake(sm=80), True),
        (None, Target.fake(device="cpu"), True),
        (None, Target.fake(), False),
        ((90, 90), Target.fake(device="cpu"), False),
    ],
)
def test_the_machine(sms: tuple[int, int] | None, machine: Target, fits: bool) -> None:
    assert dataclasses.replace(ROW, sms=sms).fits(make_spec(), machine) is fits


def test_a_newer_cudnn_than_there_is() -> None:
    assert not dataclasses.replace(ROW, cudnn=H200.cudnn + 1).fits(make_spec(), H200)
    assert dataclasses.replace(ROW, cudnn=H200.cudnn).fits(make_spec(), H200)
