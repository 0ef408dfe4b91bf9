"""Whether Hopper's kernel serves what is added to scores, and dense masks: by rows that were measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attn_compiler.lowerings.choice import hopper_added
from attn_compiler.options.options import Options
from attn_compiler.passes.writing import select
from attn_compiler.reasons.codes import Code
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target
from tests.lowerings.choice.measured import rows_from, without_evidence
from tests.lowerings.specs import CAUSAL, bias, dense, make_spec

LINES = """\
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
def measured(tmp_path: Path) -> Iterator[None]:
    with rows_from(hopper_added, LINES, tmp_path):
        yield


def _biased(seqlen: int | str, **given: Any) -> AttentionSpec:
    sizes: dict[str, Any] = {"seqlen_q": seqlen, "seqlen_kv": seqlen, "head_dim": 128}
    return make_spec(changes=(bias(1, 8, seqlen, seqlen),), **sizes | given)


def test_it_is_taken_where_it_was_faster(measured: None) -> None:
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
def test_it_is_not_taken_where_it_was_not(spec: AttentionSpec, observed: str, measured: None) -> None:
    (reason,) = hopper_added.check_added_speed(spec, "hopper")
    assert reason.code == Code.ADDED_SLOWER
    assert reason.observed.startswith(observed)


def test_with_gradients_a_mask_wants_a_faster_backward_too(measured: None) -> None:
    sizes: dict[str, Any] = {"seqlen_q": 2048, "seqlen_kv": 2048, "head_dim": 128}
    assert hopper_added.check_added_speed(make_spec(mask=MASK, needs_grad=False, **sizes), "hopper") == []
    (reason,) = hopper_added.check_added_speed(make_spec(mask=MASK, needs_grad=True, **sizes), "hopper")
    assert reason.observed.startswith("300 TFLOP/s, triton 310")
    # That of a learned bias is the Triton family's.
    assert hopper_added.check_added_speed(_biased(2048, needs_grad=True), "hopper") == []
    held = make_spec(changes=(bias(1, 8, 2048, 2048, requires_grad=False),), needs_grad=True, **sizes)
    (reason,) = hopper_added.check_added_speed(held, "hopper")
    assert reason.observed.startswith("no row of the backward with a dense bias")


def test_others_and_other_sites_are_not_asked(measured: None) -> None:
    assert hopper_added.check_added_speed(_biased(512), "triton") == []
    assert hopper_added.check_added_speed(make_spec(mask=CAUSAL), "hopper") == []


def test_who_names_it_gets_it() -> None:
    with_rows = select.decide(_biased(2048), Target.fake(), Options(lowering="hopper"))
    assert with_rows.lowering == "hopper"


def test_who_does_not_gets_what_was_measured(measured: None) -> None:
    assert select.decide(_biased(2048), Target.fake(), Options()).lowering == "hopper"
    assert select.decide(_biased(512), Target.fake(), Options()).lowering == "triton"


def test_the_file_has_its_columns() -> None:
    assert {row.part for row in hopper_added.TABLE.rows()} <= hopper_added.PARTS


def test_what_decides_was_measured() -> None:
    assert without_evidence(hopper_added, "added_h200.csv", ("hopper", "triton"), "pass") == []
