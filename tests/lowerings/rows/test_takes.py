"""What attention by rows takes: masks that leave each query keys in pieces, on a CPU, and what is added by distance."""

from __future__ import annotations

from typing import Any

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load
from attn_compiler.lowerings.rows.takes import TAKES
from attn_compiler.lowerings.shared.limits.takes import refused
from attn_compiler.lowerings.shared.parts.site_parts import ADDED
from attn_compiler.spec.masks import Dense, Document, KeyPadding, MaskSpec
from attn_compiler.spec.scores import Sinks, Softcap
from tests.lowerings.specs import CAUSAL, bias, make_spec, words

PADDED = KeyPadding(condition=ix.as_bool(Load("mask", (Index("b"), Index("k")), "int")))
#: the model's own
TENSOR = Dense(shape=(2, 1, 128, 128), dtype="bool")
PACKED = Document(of_key=Load("ids", (Index("b"), Index("k")), "int"))


@pytest.mark.parametrize(
    "spec",
    [
        {"mask": CAUSAL},
        {"mask": MaskSpec(kinds=(PADDED,), dense=TENSOR)},
        {"mask": MaskSpec(kinds=(PACKED,), dense=TENSOR)},
        {"dtype": "float64"},
        {"head_dim": 7},
        {"heads_kv": 2},
        {"batch": 70_000},
        {"seqlen_q": "s0", "seqlen_kv": "s0"},
    ],
    ids=str,
)
def test_it_takes_any_sizes_and_masks_that_leave_pieces(spec: dict[str, Any]) -> None:
    asked = make_spec(device="cpu", **spec)
    assert refused(TAKES, asked) == []
    assert TAKES.beyond(asked) == set()


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        ({"changes": (Softcap(cap=30.0),)}, "no softcap"),
        ({"changes": (Sinks(requires_grad=False),)}, "no attention sinks"),
        ({"head_dim_v": 32}, "q, k and v have one head_dim"),
        ({"dropout_p": 0.1}, "no dropout"),
        ({"dtype": "float8_e4m3fn"}, "observed float8_e4m3fn"),
    ],
)
def test_what_it_has_no_argument_for_is_refused(spec: dict[str, Any], rule: str) -> None:
    assert rule in words(refused(TAKES, make_spec(device="cpu", **spec)))


def test_of_what_is_added_to_scores_it_takes_numbers_by_distance() -> None:
    assert TAKES.parts & ADDED == {"distances", "slopes"}
    assert TAKES.beyond(make_spec(device="cpu", changes=(bias(1, 8, 128, 128),))) == {"bias"}
