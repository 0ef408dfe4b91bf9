"""Conversions against tensors: what is claimed to be exact is what a tensor of the dtype holds, and nothing wraps unseen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Linear, Load, Size
from attn_compiler.index_expr.ranges import LOADED_KEY
from attn_compiler.passes.recovering.reading import converting
from attn_compiler.passes.recovering.reading.converting import LONGEST, converted, fits, largest_loaded, nearest, ranges

Q, K = Index("q"), Index("k")
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@settings(deadline=None)
@given(st.sampled_from([torch.bool, *INTS, *FLOATS]), st.integers(-300, 70000), st.integers(1, 3), st.integers(1, 300))
def test_positions_converted_are_what_a_tensor_holds(dtype: torch.dtype, start: int, step: int, length: int) -> None:
    x = ix.add(ix.mul(Q, Const(step)), Const(start))
    held = (torch.arange(length) * step + start).to(dtype)
    found = converted(x, torch.int64, dtype, ranges(x, torch.Size([length]), (Q,)))
    if found is None or not ix.is_exact(found):
        # Never for want of trying: the largest of them is really out of reach.
        largest = torch.iinfo(dtype).max if dtype in INTS else 2 / torch.finfo(dtype).eps
        assert start + step * (length - 1) > largest or start < (torch.iinfo(dtype).min if dtype in INTS else -largest)
        return
    assert [ix.evaluate(found, {"q": q}, lambda *_: None) for q in range(length)] == held.tolist()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [0.1, 1.0, 65505.0, 1e-8, -3.4028234663852886e38, 1e300, float("inf")])
def test_a_number_is_rounded_as_tensors_round_it(dtype: torch.dtype, value: float) -> None:
    assert nearest(value, dtype) == torch.tensor(value, dtype=dtype).item()
    assert converted(Const(value), None, dtype, {}) == Const(torch.tensor(value, dtype=dtype).item())


@pytest.mark.parametrize(
    ("length", "dtype", "exact"),
    [
        (256, torch.bfloat16, True),
        (258, torch.bfloat16, False),
        (2048, torch.float16, True),
        (2050, torch.float16, False),
        (2**24, torch.float32, True),
        (2**24 + 2, torch.float32, False),
        (2**24 + 2, torch.float64, True),
    ],
)
def test_positions_are_exact_up_to_what_a_float_holds(length: int, dtype: torch.dtype, exact: bool) -> None:
    found = converted(Q, torch.int64, dtype, ranges(Q, torch.Size([length]), (Q,)))
    assert found is not None
    assert ix.is_exact(found) == exact


@pytest.mark.parametrize(
    ("x", "dtype", "fitting"),
    [
        (Const(255), torch.uint8, True),
        (Const(-1), torch.uint8, False),
        (Q, torch.uint8, True),
        (ix.mul(Q, Const(60)), torch.uint8, False),
        (ix.add(Q, K, -1), torch.uint8, False),
        (ix.add(Q, K, -1), torch.int8, True),
        (ix.where(ix.compare("<=", K, Q), Const(200), Const(0)), torch.uint8, True),
        (ix.where(ix.compare("<=", K, Q), Const(200), Const(0)), torch.int8, False),
        (ix.compare("<=", K, Q), torch.uint8, True),
        (Load("x", (Q,), "int"), torch.int16, False),
        (Load("x", (Q,), "int"), torch.int64, True),
    ],
)
def test_what_may_wrap_does_not_fit(x: Expr, dtype: torch.dtype, fitting: bool) -> None:
    within = ranges(x, torch.Size([6, 8]), (Q, K))
    assert fits(x, dtype, within) == fitting
    assert (converted(x, torch.int64, dtype, within) is not None) == fitting


def test_a_wider_float_changes_nothing_and_a_narrower_one_rounds() -> None:
    x = Load("x", (Q,), "float")
    assert converted(x, torch.bfloat16, torch.float32, {}) == x
    narrower = converted(x, torch.float32, torch.bfloat16, {})
    assert narrower == ix.Apply("rounded", (x,))
    assert not ix.is_exact(narrower)
    # Neither holds all of the other.
    assert converted(x, torch.float16, torch.bfloat16, {}) == ix.Apply("rounded", (x,))


def test_choices_of_numbers_are_rounded_one_by_one() -> None:
    causal = ix.compare("<=", K, Q)
    found = converted(ix.where(causal, Const(0.0), Const(-1e9)), torch.float32, torch.float16, {})
    assert found == ix.where(causal, Const(0.0), Const(float("-inf")))


def test_ranges_come_from_the_shape() -> None:
    x = ix.add(ix.add(Q, K), Size("s9"))
    assert ranges(x, torch.Size([6, 8]), (Q, K)) == {"q": Linear((), 5), "k": Linear((), 7), "s9": Linear((), LONGEST)}
    # k + 3 runs below 8, and 2·q below 6.
    shifted = (ix.mul(Q, Const(2)), ix.add(K, Const(3)))
    assert ranges(ix.add(Q, K), torch.Size([6, 8]), shifted) == {"q": Linear((), 2), "k": Linear((), 4)}
    # Nothing is known of an index that only a gather uses.
    assert ranges(Q, torch.Size([6]), (Load("order", (Q,), "int"),)) == {}


def test_kinds_of_dtypes() -> None:
    assert [converting.kind_of_dtype(d) for d in (torch.bool, torch.uint8, torch.bfloat16)] == ["bool", "int", "float"]


def test_how_large_what_is_loaded_can_be_follows_from_its_dtype() -> None:
    x = Load("x", (Q,), "int")
    for dtype, wider in ((torch.int8, torch.int16), (torch.uint8, torch.int16), (torch.int32, torch.int64)):
        named = {LOADED_KEY.format("x"): largest_loaded(dtype)}
        within = ranges(x, torch.Size([6]), (Q,), named=named)
        assert fits(ix.add(x, ix.ONE), wider, within)
        assert not fits(ix.add(x, ix.ONE), dtype, within)


def test_sums_of_what_is_loaded_in_64_bits_fit_and_multiples_do_not() -> None:
    x, y = (Load(name, (Q,), "int") for name in "xy")
    within = ranges(x, torch.Size([6]), (Q,))
    assert fits(ix.add(ix.add(x, y, -1), ix.add(Q, Const(4096))), torch.int64, within)
    assert fits(ix.mul(x, y), torch.int64, within)
    assert not fits(ix.mul(x, Const(4)), torch.int64, within)
    assert not fits(ix.mul(ix.mul(x, y), x), torch.int64, within)
    wrapped = {LOADED_KEY.format("x"): largest_loaded(torch.int64, by_arithmetic=True)}
    assert not fits(ix.add(x, ix.ONE), torch.int64, ranges(x, torch.Size([6]), (Q,), named=wrapped))
    assert fits(x, torch.int64, ranges(x, torch.Size([6]), (Q,), named=wrapped))


def test_an_index_without_a_range_runs_along_an_axis() -> None:
    """As inside of a vmap, whose elements have other indices than their tensor has axes."""
    assert fits(ix.mul(Q, Const(1000)), torch.int64, {})
    assert fits(ix.mul(Q, K), torch.int64, {"k": Linear((), 7)})
    assert not fits(ix.mul(Q, K), torch.int64, {})
    assert not fits(Q, torch.int32, {})


@pytest.mark.parametrize(
    ("source", "dtype"), [(torch.int64, torch.int64), (torch.uint8, torch.int16), (torch.bool, torch.int8)]
)
def test_a_dtype_that_holds_all_of_another_one_changes_nothing(source: torch.dtype, dtype: torch.dtype) -> None:
    x = Load("x", (Q,), "int")
    anything = ranges(x, torch.Size([6]), (Q,), named={LOADED_KEY.format("x"): 2**63 - 1})
    assert converted(x, source, dtype, anything) == x


def test_a_float_is_a_whole_number_of_64_bits_only() -> None:
    x = Load("x", (Q,), "float")
    assert converted(x, torch.float32, torch.int64, {}) == ix.apply("int", x)
    assert converted(x, torch.float32, torch.int32, {}) is None
