"""Rows by head dim: heads in parts, wide heads, additions on Hopper."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attn_compiler.index_expr import Index, Load, as_bool as truth
from attn_compiler.lowerings.choice import evidence, head_parts, hopper_added, priorities, shape_class
from attn_compiler.lowerings.choice.rows import MOST_QUERIES
from attn_compiler.lowerings.shared.parts.kernel_plan import head_dim_sums, head_dim_tiles
from attn_compiler.options.options import Options
from attn_compiler.passes.writing import select
from attn_compiler.passes.writing.select import decide
from attn_compiler.reasons.codes import Code
from attn_compiler.spec import masks
from attn_compiler.spec.attention import AttentionSpec, Dim
from attn_compiler.spec.masks import MaskSpec
from attn_compiler.spec.scores import Sinks, Softcap
from attn_compiler.spec.target import Target
from tests.lowerings.choice.measured import rows_from, without_evidence
from tests.lowerings.specs import CAUSAL, bias, dense, make_spec

# Whether head dims are multiplied as sums of powers of two.
LINES = """\
mask,band,head_dim_qk,head_dim_v,seqlen,summed,padded,since,case
causal,causal,80,80,8192,500,447,2026-11-24,a
causal,causal,80,80,2048,390,391,2026-11-24,b
causal,causal,80,80,2048,390,350,2026-11-24,b of 72
causal,causal,80,80,1024,300,250,2026-11-24,c
"""


@pytest.fixture
def measured(tmp_path: Path) -> Iterator[None]:
    with rows_from(head_parts, LINES, tmp_path):
        yield


def _spec(seqlen: int | str, **given: Any) -> AttentionSpec:
    return make_spec(**{"seqlen_q": seqlen, "seqlen_kv": seqlen, "mask": CAUSAL, "head_dim": 80, **given})


@pytest.mark.parametrize("seqlen", [8192, 32768, 5000, 1024, 513])
@pytest.mark.parametrize("head_dim", [72, 80])
def test_it_is_where_it_was_faster(seqlen: int, head_dim: int, measured: None) -> None:
    assert head_parts.is_faster(_spec(seqlen, head_dim=head_dim))


def test_of_rows_that_are_as_near_all_have_to_be_faster(measured: None) -> None:
    assert not head_parts.is_faster(_spec(2048))
    assert not head_parts.is_faster(_spec(3000))


_PADDING = masks.KeyPadding(condition=truth(Load("of_key", (Index("b"), Index("k")), "int")))


@pytest.mark.parametrize(
    "spec",
    [
        _spec(511),
        _spec("s0"),
        _spec(8192, seqlen_q=4000),
        _spec(8192, head_dim=96),
        _spec(8192, head_dim_v=64),
        _spec(8192, head_dim=128),
        _spec(8192, head_dim=256),
        _spec(8192, mask=masks.MaskSpec()),
        _spec(
            8192,
            mask=masks.MaskSpec(kinds=(masks.Causal(), _PADDING), dense=masks.Dense(shape=(2, 1, 8192, 8192), dtype="bool")),
        ),
    ],
)  # fmt: skip
def test_a_shape_that_no_row_speaks_for_gets_powers_of_two(spec: AttentionSpec, measured: None) -> None:
    assert not head_parts.is_faster(spec)


def test_a_softcap_counts_as_its_band(measured: None) -> None:
    assert head_parts.is_faster(_spec(8192, changes=(Softcap(cap=30.0),)))


def test_unknown_head_dims_are_an_error(measured: None) -> None:
    with pytest.raises(TypeError, match="unknown head dims"):
        head_parts.is_faster(_spec(8192, head_dim="s0"))


def test_what_was_measured_is_well_formed() -> None:
    for row in head_parts.TABLE.rows():
        spec = make_spec(head_dim=row.head_dim_qk, head_dim_v=row.head_dim_v)
        assert (row.head_dim_qk, row.head_dim_v) == head_dim_sums(spec) != head_dim_tiles(spec)
        assert row.band in shape_class.BANDS
        assert row.mask in (*shape_class.MASKS, "intervals")
        assert min(row.summed, row.padded) > 0


def test_what_decides_was_measured() -> None:
    assert without_evidence(head_parts, "head_parts_h200.csv", ("summed", "padded")) == []


# Head dims above 256 get kernels of ours wherever these take them.
MACHINES = (80, 86, 89, 90, 100, 103, 120)


def chosen(sm: int, **given: Any) -> str:
    sizes: dict[str, Any] = {"head_dim": 512, "seqlen_q": 2048, "seqlen_kv": 2048, "mask": CAUSAL}
    return decide(make_spec(**sizes | given), Target.fake(sm=sm), Options()).lowering


@pytest.mark.parametrize("sm", MACHINES)
@pytest.mark.parametrize("seqlen", [2048, "s0"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_prefill_and_training(sm: int, seqlen: Dim, needs_grad: bool) -> None:
    """Hopper has a kernel of its own for what was measured, and for sinks as for what has none."""
    sizes: dict[str, Any] = {"seqlen_q": seqlen, "seqlen_kv": seqlen, "needs_grad": needs_grad}
    masks: tuple[MaskSpec, ...] = (CAUSAL, MaskSpec(), dense(2, 1, 1, seqlen))
    for mask in masks:
        for further in ({}, {"changes": (Sinks(requires_grad=False),)}, {"head_dim": 384}, {"head_dim": 320}):
            assert chosen(sm, mask=mask, **sizes, **further) == ("hopper" if sm == 90 else "triton")
        for left_out in ({"head_dim": 264}, {"dropout_p": 0.1}):
            assert chosen(sm, mask=mask, **sizes, **left_out) == "triton"
    if sm == 90:
        assert chosen(sm, mask=dense(2, 1, seqlen, seqlen), **sizes) == "triton"


@pytest.mark.parametrize("sm", MACHINES)
@pytest.mark.parametrize("seqlen_q", [1, MOST_QUERIES])
def test_decoding(sm: int, seqlen_q: int) -> None:
    sizes: dict[str, Any] = {"seqlen_q": seqlen_q, "seqlen_kv": "s0", "needs_grad": False}
    for mask in (MaskSpec(), dense(2, 1, 1, "s0")):
        assert chosen(sm, mask=mask, **sizes) == "decode"
    of_few = sizes | {"seqlen_q": MOST_QUERIES + 1, "seqlen_kv": 65536}
    assert chosen(sm, mask=MaskSpec(), **of_few) == ("hopper" if sm == 90 else "triton")


@pytest.mark.parametrize("sm", MACHINES)
def test_what_ours_refuse_is_left_to_pytorchs(sm: int) -> None:
    assert chosen(sm, changes=(bias(1, 8, 2048, 2048),), mask=MaskSpec(), needs_grad=True) == "sdpa_efficient"
    assert chosen(sm, head_dim=520) == "sdpa_efficient"
    assert chosen(sm, head_dim=512, dtype="float32") == "sdpa_efficient"


def test_head_dims_up_to_256_have_other_rows() -> None:
    for sm in MACHINES:
        for head_dim in (256, 264):
            row = priorities.row_of(make_spec(head_dim=head_dim, seqlen_q=2048, seqlen_kv=2048), Target.fake(sm=sm))
            assert (row in priorities.group("wide")) == (head_dim == 264)


def test_rows_say_whether_they_were_measured() -> None:
    for row in priorities.group("wide"):
        assert row.sms is not None
        assert row.measured == (row.sms == (90, 90))
        assert row.measured != row.why.endswith("not measured here")
    found = evidence.evidence(
        dataclasses.replace(make_spec(head_dim=512, seqlen_q=2048, seqlen_kv=2048)), Target.fake(sm=80)
    )
    assert found is not None
    assert not found.measured


# Whether Hopper's kernel serves what is added to scores, and dense masks.
ADDED_LINES = """\
part,pass,head_dim_from,head_dim_to,seqlen,hopper,triton,device,since,case
bias,forward,65,128,2048,500,372,H200,2026-11-26,bias_d128_s2048
bias,forward,65,128,512,300,340,H200,2026-11-26,bias_d128_s512
mask,forward,1,64,2048,300,250,H200,2026-11-26,mask_holes_d64_s2048
mask,forward,1,64,2048,200,250,H200,2026-11-26,mask_blocks_d64_s2048
mask,forward,65,128,2048,300,250,H200,2026-11-26,mask_holes_d128_s2048
mask,backward,65,128,2048,300,310,H200,2026-11-26,mask_holes_d128_s2048
"""

MASK = dense(2, 1, 2048, 2048)


@pytest.fixture
def measured_added(tmp_path: Path) -> Iterator[None]:
    with rows_from(hopper_added, ADDED_LINES, tmp_path):
        yield


def _biased(seqlen: int | str, **given: Any) -> AttentionSpec:
    sizes: dict[str, Any] = {"seqlen_q": seqlen, "seqlen_kv": seqlen, "head_dim": 128}
    return make_spec(changes=(bias(1, 8, seqlen, seqlen),), **sizes | given)


def test_it_is_taken_where_it_was_faster(measured_added: None) -> None:
    assert hopper_added.check_added_speed(_biased(2048), "hopper") == []
    assert hopper_added.check_added_speed(_biased(8192), "hopper") == []
    # Any length, which is chosen for as 4096.
    assert hopper_added.check_added_speed(_biased("8*s0"), "hopper") == []


@pytest.mark.parametrize(
    ("spec", "observed"),
    [
        (_biased(512), "300 TFLOP/s, triton 340 (S 512; H200, 2026-11-26)"),
        (_biased(128), "lengths of 128 and 128, and the nearest row has S 512"),
        (_biased(2048, head_dim=64), "no row of the forward with a dense bias and such sizes, D 64"),
        (make_spec(mask=MASK, needs_grad=False, seqlen_q=2048, seqlen_kv=2048), "200 TFLOP/s, triton 250"),
    ],
)
def test_it_is_not_taken_where_it_was_not(spec: AttentionSpec, observed: str, measured_added: None) -> None:
    (reason,) = hopper_added.check_added_speed(spec, "hopper")
    assert reason.code == Code.ADDED_SLOWER
    assert reason.observed.startswith(observed)


def test_with_gradients_a_mask_wants_a_faster_backward_too(measured_added: None) -> None:
    sizes: dict[str, Any] = {"seqlen_q": 2048, "seqlen_kv": 2048, "head_dim": 128}
    assert hopper_added.check_added_speed(make_spec(mask=MASK, needs_grad=False, **sizes), "hopper") == []
    (reason,) = hopper_added.check_added_speed(make_spec(mask=MASK, needs_grad=True, **sizes), "hopper")
    assert reason.observed.startswith("300 TFLOP/s, triton 310")
    # That of a learned bias is the Triton family's.
    assert hopper_added.check_added_speed(_biased(2048, needs_grad=True), "hopper") == []
    held = make_spec(changes=(bias(1, 8, 2048, 2048, requires_grad=False),), needs_grad=True, **sizes)
    (reason,) = hopper_added.check_added_speed(held, "hopper")
    assert reason.observed.startswith("no row of the backward with a dense bias")


def test_others_and_other_sites_are_not_asked(measured_added: None) -> None:
    assert hopper_added.check_added_speed(_biased(512), "triton") == []
    assert hopper_added.check_added_speed(make_spec(mask=CAUSAL), "hopper") == []


def test_who_names_it_gets_it() -> None:
    with_rows = select.decide(_biased(2048), Target.fake(), Options(lowering="hopper"))
    assert with_rows.lowering == "hopper"


def test_who_does_not_gets_what_was_measured(measured_added: None) -> None:
    assert select.decide(_biased(2048), Target.fake(), Options()).lowering == "hopper"
    assert select.decide(_biased(512), Target.fake(), Options()).lowering == "triton"


def test_the_file_has_its_columns() -> None:
    assert {row.part for row in hopper_added.TABLE.rows()} <= hopper_added.PARTS


def test_what_decides_was_measured_added() -> None:
    assert without_evidence(hopper_added, "added_h200.csv", ("hopper", "triton"), "pass") == []
