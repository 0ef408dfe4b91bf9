"""Whether head dims are multiplied as sums of powers of two: by rows that were measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attn_compiler.index_expr import Index, Load, as_bool as truth
from attn_compiler.lowerings.choice import head_parts, shape_class
from attn_compiler.lowerings.shared.parts.kernel_plan import head_dim_sums, head_dim_tiles
from attn_compiler.spec import masks
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.scores import Softcap
from tests.lowerings.choice.measured import rows_from, without_evidence
from tests.lowerings.specs import CAUSAL, make_spec

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
