"""Which kinds are bands and intervals of keys."""

from __future__ import annotations

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Linear, Test
from attn_compiler.lowerings.shared.parts.intervals import Interval, K, Q
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from attn_compiler.lowerings.shared.parts.site_parts import Parts
from attn_compiler.spec import masks
from attn_compiler.spec.attention import Dim
from attn_compiler.spec.masks import SEQLEN_KV, SEQLEN_Q, Causal
from tests.lowerings.shared.parts.test_site_parts import BOTTOM_RIGHT, LENGTH, parts


def test_a_chunk_is_an_interval_of_each_query() -> None:
    rows = parts(masks.Chunked(size=16, start=ix.ONE)).rows
    assert rows is not None
    for q in range(40):
        first, end = (ix.evaluate(x, {"q": q}, lambda *_: None) for x in (rows.lower, rows.upper) if x is not None)
        assert [k for k in range(64) if (q - 1) // 16 == (k - 1) // 16] == list(range(max(first, 0), end))


def test_bands_of_two_corners_are_a_band_and_rows() -> None:
    found = parts(Causal(), BOTTOM_RIGHT)
    assert found.band == Band(right=0)
    assert found.rows == Interval(upper=ix.add(ix.add(ix.add(Q, SEQLEN_KV), SEQLEN_Q, -1), ix.ONE))


@pytest.mark.parametrize("seqlen", [128, "s0"])
def test_a_square_has_one_corner(seqlen: Dim) -> None:
    assert parts(BOTTOM_RIGHT, seqlen_q=seqlen, seqlen_kv=seqlen) == Parts(band=Band(right=0))


def test_intervals_are_intersected() -> None:
    found = parts(masks.KeyBound(side="first", bound=LENGTH), masks.Chunked(size=16), masks.CausalFrom(offset=LENGTH))
    assert found.rows is not None
    assert found.rows.lower == ix.apply("max", LENGTH, ix.mul(ix.apply("floordiv", Q, Const(16)), Const(16)))
    assert found.rows.upper is not None
    assert ix.evaluate(found.rows.upper, {"q": 17}, lambda *_: 3) == 21
    assert ix.evaluate(found.rows.upper, {"q": 17}, lambda *_: 30) == 32


def test_a_test_of_a_choice_of_keys_is_no_interval() -> None:
    either = ix.where(ix.compare("<", K, Const(4)), Q, ix.mul(Q, Const(2)))
    condition = Test(">=", Linear(((either, 1), (K, -1))))
    assert parts(masks.Formula(condition=condition)) == Parts(mask=True)


@pytest.mark.parametrize("offset", [-9, -3, 0, 4])
@pytest.mark.parametrize("factor", [-3, -2, -1, 1, 2, 3])
def test_bounds_of_every_nth_key_are_an_interval(factor: int, offset: int) -> None:
    """Keys that a rank keeps of a cache which ranks share: n · k + rank <= q."""
    form = Linear(tuple(sorted(((K, factor), (Q, -1 if factor > 0 else 1)), key=str)), offset)
    rows = parts(masks.Formula(condition=Test(">=", form))).rows
    assert rows is not None
    (bound,) = (x for x in (rows.lower, rows.upper) if x is not None)
    for q in range(20):
        first = ix.evaluate(bound, {"q": q}, lambda *_: None)
        allowed = [factor * k + (q if factor < 0 else -q) + offset >= 0 for k in range(-20, 40)]
        assert allowed == [k < first if factor < 0 else k >= first for k in range(-20, 40)]
