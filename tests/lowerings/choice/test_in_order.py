"""Whether Hopper's backward in one order is asked for: by rows that were measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attn_compiler.index_expr import Index, Load, as_bool as truth
from attn_compiler.lowerings.choice import in_order, shape_class
from attn_compiler.reasons.codes import Code
from attn_compiler.spec import masks
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.scores import Softcap
from attn_compiler.spec.target import Target
from tests.lowerings.choice.measured import rows_from
from tests.lowerings.specs import CAUSAL, bias, make_spec

H200 = Target.fake(deterministic=True)
LINES = """\
mask,band,head_dim_from,head_dim_to,seqlen,heads,in_order,triton,since,case
causal,causal,97,128,8192,4,319,368,2026-11-24,a
causal,causal,97,128,8192,16,405,368,2026-11-24,a
causal,causal,97,128,2048,16,269,284,2026-11-24,b
causal,causal,97,128,2048,64,313,284,2026-11-24,b
causal,causal,97,128,2048,64,280,284,2026-11-24,b of groups
padding,causal,97,128,2048,64,323,301,2026-11-24,c
"""


@pytest.fixture
def measured(tmp_path: Path) -> Iterator[None]:
    with rows_from(in_order, LINES, tmp_path):
        yield


def _spec(seqlen: int | str, **given: Any) -> AttentionSpec:
    sizes: dict[str, Any] = {"mask": CAUSAL, "head_dim": 128, "batch": 2, "heads": 16, "heads_kv": 16}
    return make_spec(**{"seqlen_q": seqlen, "seqlen_kv": seqlen, **sizes, **given})


def _masked(seqlen: int, kind: masks.MaskKind) -> masks.MaskSpec:
    dense = masks.Dense(shape=(8, 1, seqlen, seqlen), dtype="bool")
    return masks.MaskSpec(kinds=(masks.Causal(), kind), dense=dense)


def _padded(seqlen: int, kind: masks.MaskKind) -> AttentionSpec:
    return _spec(seqlen, batch=8, mask=_masked(seqlen, kind))


_OF_KEY = Load("of_key", (Index("b"), Index("k")), "int")


def test_it_is_taken_where_it_was_faster(measured: None) -> None:
    assert in_order.check_order_speed(_spec(8192), H200) == []
    assert in_order.check_order_speed(_spec(32768), H200) == []
    assert in_order.check_order_speed(_padded(2048, masks.KeyPadding(condition=truth(_OF_KEY))), H200) == []


def test_a_refusal_says_both_speeds_and_what_to_do(measured: None) -> None:
    (reason,) = in_order.check_order_speed(_spec(8192, batch=1, heads=4, heads_kv=4), H200)
    assert reason.code == Code.IN_ORDER_SLOWER
    assert "319 TFLOP/s, triton 368 (S 8192, 4 heads at once" in reason.observed
    assert reason.remedy is not None
    assert "use_deterministic_algorithms(False)" in reason.remedy


def test_of_rows_that_are_as_near_all_have_to_be_faster(measured: None) -> None:
    (reason,) = in_order.check_order_speed(_spec(2048, batch=8), H200)
    assert "280 TFLOP/s" in reason.observed


def test_so_many_heads_count_as_are_under_way_at_once(measured: None) -> None:
    """A GPU with fewer multiprocessors has fewer heads under way."""
    many = _spec(8192, batch=8)
    assert in_order.check_order_speed(many, H200) == []
    (reason,) = in_order.check_order_speed(many, dataclasses.replace(H200, processors=8))
    assert "4 heads at once" in reason.observed


@pytest.mark.parametrize(
    ("spec", "observed"),
    [
        (_spec("s0"), "not known"),
        (_spec(8192, batch="s0"), "not known"),
        (_spec(900), "lengths of 900 and 900"),
        (_spec(2048, seqlen_kv=8192), "lengths of 2048 and 8192"),
        (_spec(8192, head_dim=64), "causal, D 64"),
        (_spec(8192, mask=masks.MaskSpec()), "full, D 128"),
        (_padded(8192, masks.Document(of_key=_OF_KEY)), "tensor and causal"),
        (_padded(8192, masks.Chunked(size=300)), "intervals"),
        (_spec(8192, changes=(bias(1, 16, 8192, 8192),)), "added and causal"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_was_not_measured_is_left_to_the_triton_kernels(measured: None, spec: Any, observed: str) -> None:
    (reason,) = in_order.check_order_speed(spec, H200)
    assert observed in reason.observed


def test_score_changes_have_the_row_of_their_band(measured: None) -> None:
    assert in_order.check_order_speed(_spec(8192, changes=(Softcap(cap=50.0),)), H200) == []


def test_rows_are_of_sorts_that_there_are() -> None:
    for row in in_order.TABLE.rows():
        assert row.mask in shape_class.MASKS
        assert row.band in shape_class.BANDS
        assert row.in_order > 0 < row.triton


@pytest.mark.parametrize(
    ("given", "is_faster"),
    [
        ({"seqlen": 8192}, True),
        ({"seqlen": 8192, "batch": 1, "heads": 4, "heads_kv": 4}, False),
        ({"seqlen": 2048, "batch": 8}, True),
        ({"seqlen": 2048, "batch": 1}, False),
        ({"seqlen": 8192, "head_dim": 64, "heads": 32, "heads_kv": 32}, False),
        ({"seqlen": 2048, "head_dim": 64, "batch": 8, "heads": 32, "heads_kv": 32}, False),
        ({"seqlen": 8192, "head_dim": 96}, False),
        ({"seqlen": 8192, "mask": masks.MaskSpec()}, False),
        ({"seqlen": 8192, "mask": _masked(8192, masks.SlidingWindow(left=1023, right=None))}, True),
    ],
)
def test_what_was_measured_on_an_h200(given: dict[str, Any], is_faster: bool) -> None:
    spec = _spec(**given)
    assert (in_order.check_order_speed(spec, H200) == []) is is_faster
