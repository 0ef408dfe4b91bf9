from __future__ import annotations

import dataclasses

import pytest

from attn_compiler import index_expr as ix
from attn_compiler import masks
from attn_compiler.index_expr import Index, Load
from attn_compiler.lowerings.choice import shape_class
from attn_compiler.lowerings.choice.shape_class import BANDS, MASKS
from attn_compiler.masks import Causal, Dense, MaskSpec, SlidingWindow
from attn_compiler.scores import ScoreChange, Sinks, Softcap
from tests.lowerings.specs import BOTTOM_RIGHT, CAUSAL, bias, dense, make_spec

AT = (Index("b"), Index("k"))
PADDING = masks.KeyPadding(condition=ix.as_bool(Load("attention_mask", AT, "int")))
BOUND = masks.KeyBound(side="last", bound=Load("lengths", (Index("b"),), "int"))
DOCUMENT = masks.Document(of_key=Load("ids", AT, "int"))
SINKS, SOFTCAP = Sinks(requires_grad=False), Softcap(cap=30.0)


def proved(*kinds: masks.MaskKind) -> MaskSpec:
    return MaskSpec(kinds=kinds, dense=Dense(shape=(2, 1, 128, 128), dtype="bool"))


@pytest.mark.parametrize(
    ("mask", "changes", "expected"),
    [
        (MaskSpec(), (), "full"),
        (CAUSAL, (), "causal"),
        (BOTTOM_RIGHT, (), "causal"),
        (proved(Causal(), SlidingWindow(left=31, right=None)), (), "window"),
        (proved(SlidingWindow(left=31, right=31)), (), "window"),
        (CAUSAL, (SOFTCAP,), "softcap"),
        (proved(Causal(), SlidingWindow(left=31, right=None)), (SOFTCAP, SINKS), "sinks"),
        (proved(Causal(), PADDING), (), "padding"),
        (proved(Causal(), BOUND), (SINKS,), "lengths"),
        (proved(BOUND, SlidingWindow(left=31, right=None)), (), "lengths"),
        (proved(Causal(), dataclasses.replace(BOUND, side="first")), (), "padding"),
        (proved(dataclasses.replace(BOUND, bound=Load("filled", (), "int"))), (), "padding"),
        (proved(Causal(), BOUND, PADDING), (), "padding"),
        (dense(2, 1, 1, 128), (), "padding"),
        (proved(Causal(), DOCUMENT), (), "tensor"),
        (dense(2, 1, 128, 128), (SOFTCAP,), "tensor"),
        (dense(2, 1, 128, 128, dtype="bfloat16"), (), "added"),
        (CAUSAL, (bias(1, 8, 128, 128),), "added"),
    ],
)
def test_sorts_of_masks(mask: MaskSpec, changes: tuple[ScoreChange, ...], expected: str) -> None:
    assert shape_class.of(make_spec(mask=mask, changes=changes)).mask == expected
    assert expected in MASKS


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (MaskSpec(), "full"),
        (CAUSAL, "causal"),
        (proved(Causal(), PADDING), "causal"),
        (proved(PADDING), "full"),
        (proved(Causal(), SlidingWindow(left=31, right=None), PADDING), "window"),
        (proved(Causal(), DOCUMENT), "causal"),
    ],
)
def test_bands(mask: MaskSpec, expected: str) -> None:
    assert shape_class.of(make_spec(mask=mask)).band == expected
    assert expected in BANDS


def test_sizes() -> None:
    shape = shape_class.of(make_spec(head_dim=64, head_dim_v=96, seqlen_q=512, seqlen_kv=100, heads_kv=2))
    assert (shape.head_dim, shape.seqlens, shape.grouped) == (96, (100, 512), True)
    assert shape.elements == 2 * 8 * 512 * 64


@pytest.mark.parametrize("unknown", [{"seqlen_q": "s0"}, {"seqlen_kv": "s0"}, {"seqlen_q": "s0", "seqlen_kv": "s0"}])
def test_sizes_that_are_not_known(unknown: dict[str, str]) -> None:
    assert shape_class.of(make_spec(**unknown)).seqlens is None  # type: ignore[arg-type]
    assert shape_class.of(make_spec(head_dim="s1")).head_dim is None
    assert shape_class.of(make_spec(head_dim="s1")).elements is None
