"""What a query without keys is, from what masks and in which order."""

from __future__ import annotations

import math

import pytest
import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Load
from attn_compiler.passes.graph.site import Keyless
from attn_compiler.passes.recovering import keyless
from attn_compiler.passes.recovering.keyless import MaskStep

LOWEST = torch.finfo(torch.float32).min
B, Q, K = map(Index, "bqk")
KEY = ix.as_bool(Load("real", (B, K), "int"))
QUERY = ix.as_bool(Load("real", (B, Q), "int"))
CAUSAL = ix.compare("<=", K, Q)
INFINITE = -math.inf


def step(allowed: Expr | None, fill: float, *, replaces: bool = True, added: Expr | None = None) -> MaskStep:
    return MaskStep(allowed=allowed, fills=frozenset({fill}), replaces=replaces, added=added)


def of(
    *steps: MaskStep, dtype: torch.dtype = torch.float32, square: bool = True, low: float = INFINITE
) -> Keyless | None:
    return keyless.of(steps, dtype, {}, square=square, low=low)


def found(*steps: MaskStep, dtype: torch.dtype = torch.float32, low: float = INFINITE) -> Keyless:
    result = of(*steps, dtype=dtype, low=low)
    assert result is not None
    return result


@pytest.mark.parametrize(
    "steps",
    [
        [step(KEY, LOWEST)],
        [step(KEY, -1e9), step(CAUSAL, -1e9)],
        [step(ix.apply("and", KEY, CAUSAL), -1e9)],
        [step(None, -1e9)],
        # Whatever was there before is gone.
        [step(KEY, -1e9, replaces=False), step(CAUSAL, -1e9)],
    ],
)
def test_one_number_gives_the_mean(steps: list[MaskStep]) -> None:
    result = found(*steps)
    assert result.numbers is None
    assert result.own is None
    assert result.through == (not steps[0].replaces)


def test_a_number_that_is_added_to_some_scores_and_replaces_others_leaves_a_gradient_to_some() -> None:
    added, in_place = step(KEY, -1e9, replaces=False), step(CAUSAL, -1e9)
    assert [found(*steps).partly for steps in ([added, in_place], [added], [step(KEY, -1e9)])] == [True, False, False]


def test_what_is_added_twice_is_another_number() -> None:
    """-inf where both mask: such keys have no weight beside those that one masks."""
    result = found(step(KEY, LOWEST, replaces=False), step(CAUSAL, LOWEST, replaces=False))
    assert result.own is None
    assert result.numbers is not None
    at = {"b": 0, "q": 0, "k": 1}
    for real, number in ((1, LOWEST), (0, 2 * LOWEST)):
        assert ix.evaluate(result.numbers, at, lambda name, place, real=real: real) == number


def test_a_clamp_makes_one_number_of_both() -> None:
    steps = [step(KEY, LOWEST, replaces=False), step(CAUSAL, LOWEST, replaces=False)]
    assert found(*steps, low=LOWEST).numbers is None


def test_infinity_beside_a_number_leaves_the_keys_that_the_number_masks() -> None:
    result = found(step(KEY, LOWEST), step(CAUSAL, INFINITE))
    assert result.numbers == ix.where(CAUSAL, ix.where(KEY, Const(0.0), Const(LOWEST)), Const(INFINITE))
    assert not result.through


@pytest.mark.parametrize(
    ("fill", "dtype", "is_lost"),
    [
        (-1e9, torch.float32, True),
        (-1e9, torch.float64, False),
        (-1e9, torch.bfloat16, True),
        (-65504.0, torch.float16, True),
        (-65504.0, torch.float32, False),
        (torch.finfo(torch.float64).min, torch.float64, True),
    ],
)
def test_a_score_is_lost_beside_a_number_that_has_no_digits_for_it(
    fill: float, dtype: torch.dtype, is_lost: bool
) -> None:
    assert (found(step(KEY, fill, replaces=False), dtype=dtype).own is None) == is_lost
    assert found(step(KEY, fill), dtype=dtype).own is None


@pytest.mark.parametrize(
    "steps",
    [
        [step(KEY, -1e9), step(CAUSAL, -1e9 - 64)],
        [MaskStep(allowed=KEY, fills=frozenset({-1e9, -1e12}), replaces=False)],
        [step(None, -1e9), step(CAUSAL, -1e12)],
        [step(KEY, -1e9)] * 7,
    ],
)
def test_what_is_not_known_is_the_models_own(steps: list[MaskStep]) -> None:
    assert found(*steps).own is not None


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [step(KEY, INFINITE)],
        [step(None, INFINITE), step(CAUSAL, INFINITE)],
        [step(CAUSAL, LOWEST)],
        [step(ix.compare("<=", ix.add(Q, Const(-3)), K), LOWEST), step(CAUSAL, LOWEST)],
        [step(ix.apply("eq", Load("document", (B, Q), "int"), Load("document", (B, K), "int")), LOWEST)],
        # The part of a cache that is filled: a position is none below 0.
        [step(ix.compare("<=", K, Load("position", (Q,), "int")), LOWEST)],
    ],
)
def test_nothing_where_each_query_has_a_key_or_pytorch_answers(steps: list[MaskStep]) -> None:
    assert of(*steps) is None


@pytest.mark.parametrize(
    "allowed",
    [
        KEY,
        QUERY,
        ix.compare("<", K, Q),
        ix.compare("<", K, Load("length", (B,), "int")),
        ix.compare("<=", Q, ix.add(K, Const(-1))),
    ],
)
def test_a_query_may_be_without_keys(allowed: Expr) -> None:
    assert of(step(allowed, LOWEST)) is not None


def test_of_more_queries_than_keys_the_last_have_no_key_of_their_own() -> None:
    near = ix.compare("<=", ix.add(Q, Const(-3)), K)
    assert of(step(near, LOWEST)) is None
    assert of(step(near, LOWEST), square=False) is not None
