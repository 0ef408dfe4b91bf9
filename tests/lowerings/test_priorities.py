from __future__ import annotations

import pytest

from attn_compiler.lowerings import LOWERINGS, by_name, order, priorities
from attn_compiler.target import Target
from tests import cases
from tests.cases import BY_NAME

SPEC = cases.build(BY_NAME["causal_bfloat16"]).spec

CUDNN_FIRST = ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "untouched")
FLASH_FIRST = ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "untouched")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (Target.fake(device="cpu"), ("sdpa_cpu_flash", "untouched")),
        (Target.fake(sm=90), CUDNN_FIRST),
        (Target.fake(sm=100), CUDNN_FIRST),
        (Target.fake(sm=103), CUDNN_FIRST),
        (Target.fake(sm=90, cudnn=91501), CUDNN_FIRST),
        (Target.fake(sm=90, cudnn=91500), FLASH_FIRST),
        (Target.fake(sm=100, cudnn=91000), FLASH_FIRST),
        (Target.fake(sm=80), FLASH_FIRST),
        (Target.fake(sm=86), FLASH_FIRST),
        (Target.fake(sm=89), FLASH_FIRST),
        (Target.fake(sm=120), FLASH_FIRST),
        (Target.fake(sm=75), ("sdpa_efficient", "untouched")),
        (Target.fake(sm=0, cudnn=0), ("untouched",)),
        (Target.fake(sm=200), ("untouched",)),
    ],
    ids=lambda value: value.words if isinstance(value, Target) else None,
)
def test_order(target: Target, expected: tuple[str, ...]) -> None:
    assert order(SPEC, target) == expected


def test_rows_name_lowerings_and_their_evidence() -> None:
    names = {lowering.name for lowering in LOWERINGS}
    for row in priorities.ROWS:
        assert set(row.order) < names - {"reference", "untouched"}
        assert len(set(row.order)) == len(row.order)
        assert row.why
        assert row.since


def test_lowerings_are_registered_once_each() -> None:
    assert [lowering.name for lowering in LOWERINGS] == [
        "reference",
        "sdpa_cudnn",
        "sdpa_flash",
        "sdpa_efficient",
        "sdpa_cpu_flash",
        "untouched",
    ]
    with pytest.raises(KeyError, match="no lowering 'fa9'; there are reference, sdpa_cudnn"):
        by_name("fa9")


def test_every_lowering_keeps_the_contract() -> None:
    for lowering in LOWERINGS:
        assert by_name(lowering.name) is lowering
        for method in ("unavailable", "why_not", "demand", "emit"):
            assert callable(getattr(lowering, method))
