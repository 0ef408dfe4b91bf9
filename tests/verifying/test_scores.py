"""What is added to the scores against what was proved of it: right kinds pass, and every sort of wrong one is found."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Load
from attn_compiler.spec.added_scores import (
    Alibi,
    Bias,
    BiasFormula,
    GatheredBias,
    Penalty,
    ProvedScore,
    RegionPenalty,
    RelativeBias,
)
from attn_compiler.verifying import pairs
from attn_compiler.verifying.values import Values
from tests.verifying.planning import LENGTH, PADDING, SHAPE, Planned, Tensor, masked_alibi, planned, qkv

B, H, Q, K = map(Index, "bhqk")
HEADS = SHAPE[1]
LOWEST = torch.finfo(torch.float32).min
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
TABLE = torch.linspace(-1.0, 1.0, 8 * HEADS).reshape(8, HEADS)
INDEX = torch.arange(LENGTH * LENGTH).reshape(LENGTH, LENGTH) % 8
HALF = torch.finfo(torch.bfloat16).eps
SINGLE = torch.finfo(torch.float32).eps


def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))


def _apart(q: Tensor, k: Tensor) -> Tensor:
    return torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]


def alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    return _attention(q, k, v, slopes.to(q.dtype)[:, None, None] * _apart(q, k))


def buckets(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """T5's, both ways."""
    apart = _apart(q, k)
    far = apart.abs()
    wide = 2 + (torch.log(far.float() / 2) / math.log(20 / 2) * 2).to(torch.long)
    bucket = (apart > 0).to(torch.long) * 4 + torch.where(far < 2, far, torch.min(wide, torch.full_like(wide, 3)))
    return _attention(q, k, v, F.embedding(bucket, table).permute(2, 0, 1)[None])


def gathered(q: Tensor, k: Tensor, v: Tensor, table: Tensor, index: Tensor) -> Tensor:
    return _attention(q, k, v, table[index.reshape(-1)].reshape(LENGTH, LENGTH, HEADS).permute(2, 0, 1)[None])


def regions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    region = torch.arange(k.shape[-2]) // 2
    return _attention(q, k, v, torch.where(region[:, None] != region, -100.0, 0.0))


def penalty(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _attention(q, k, v, torch.where(_apart(q, k) > 0, -1000.0, 0.0))


def ready_made(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT + bias * 0.5).softmax(-1) @ v


def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _attention(q, k, v, (_apart(q, k) + 0.5).abs() * 0.1)


BIAS = torch.linspace(-2.0, 2.0, HEADS * LENGTH).reshape(1, HEADS, 1, LENGTH)


def _one_more(position: Expr) -> Expr:
    return ix.add(position, ix.mul(K, K))


def _next_row(at: tuple[Expr, ...]) -> tuple[Expr, ...]:
    return ix.apply("mod", ix.add(at[0], ix.ONE), Const(8)), at[1]


#: a model, its inputs, and what makes a wrong kind of the same sort: off by a position, a row of the table, or a little in size
CASES: dict[type[ProvedScore], tuple[Callable[..., Tensor], tuple[Tensor, ...], str, Callable[[Any], Any]]] = {
    Alibi: (alibi, (SLOPES,), "position", _one_more),
    RelativeBias: (buckets, (TABLE,), "at", _next_row),
    GatheredBias: (gathered, (TABLE, INDEX), "at", _next_row),
    RegionPenalty: (regions, (), "of_key", lambda _: ix.apply("floordiv", K, Const(3))),
    Penalty: (penalty, (), "condition", lambda _: ix.compare(">=", K, Q)),
    Bias: (ready_made, (BIAS,), "weight", lambda x: x * 1.1),
    BiasFormula: (formula, (), "value", lambda x: ix.mul(x, Const(1.1))),
}


def _case(kind: type[ProvedScore], dtype: torch.dtype = torch.float32) -> Planned:
    function, more, *_ = CASES[kind]
    return planned(function, *qkv(dtype=dtype), *(x.to(dtype) if x.is_floating_point() else x for x in more))


def _kind(found: Planned) -> Any:
    (kind,) = found.check("bias").site.spec.score.proved
    return kind


def _believed(found: Planned, *kinds: ProvedScore) -> Planned:
    """The plan, had these kinds been proved."""
    site = found.check("bias").site
    site.spec = dataclasses.replace(site.spec, score=dataclasses.replace(site.spec.score, proved=kinds))
    return found


def test_every_kind_has_a_case() -> None:
    assert set(CASES) == set(ProvedScore.__args__)  # type: ignore[attr-defined]


@pytest.mark.in_turns
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_right_kinds_pass_and_wrong_ones_are_found(kind: type[ProvedScore], dtype: torch.dtype) -> None:
    found = _case(kind, dtype)
    right = _kind(found)
    assert isinstance(right, kind)
    result = found.run("bias")
    assert result.skipped is None
    assert result.elements >= LENGTH
    assert result.formula == right.words
    assert result.error is not None
    assert result.allowed is not None
    assert result.error <= result.allowed
    *_, field, change = CASES[kind]
    wrong = dataclasses.replace(right, **{field: change(getattr(right, field))})
    # The sum of the kinds is what is compared.
    for kinds in ((wrong,), (right, right)):
        error = _believed(found, *kinds).mismatch()
        assert error.what == "recovered bias"
        assert error.formula == (wrong.words if kinds == (wrong,) else found.check("bias").formula)


def test_the_worst_element_is_named() -> None:
    found = _case(Alibi)
    wrong_at: Expr = ix.apply("and", ix.compare("==", K, Const(2)), ix.compare("==", Q, Const(4)))
    wrong = BiasFormula(value=ix.as_float(ix.as_int(ix.apply("and", wrong_at, ix.compare("==", H, Const(3))))))
    error = _believed(found, _kind(found), wrong).mismatch()
    assert (error.index, error.observed) == ("b=0, h=3, q=4, k=2", "0.875")
    assert error.expected.startswith("-0.125 (")
    assert error.differing.startswith("1 of ")


@pytest.mark.parametrize("most", [1, 7, 2**24])
def test_slices_of_any_size_find_the_same(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(pairs, "MOST_PAIRS", most)
    found = _case(Alibi)
    assert found.run("bias").elements == HEADS * LENGTH * LENGTH
    _believed(found, dataclasses.replace(_kind(found), position=_one_more(_kind(found).position))).mismatch()


def test_what_is_masked_is_the_masks() -> None:
    """A bias may be anything where the pair is masked, and nothing but itself elsewhere."""
    found = planned(masked_alibi, *qkv(), SLOPES, PADDING)
    kept = (PADDING != 0)[:, None, :] & torch.ones(LENGTH, LENGTH).tril().bool()
    assert found.run("bias").elements == HEADS * int(kept.sum())
    right, above = _kind(found), ix.compare(">", K, Q)
    assert _believed(found, right, Penalty(value=-5.0, condition=above)).run("bias").skipped is None
    _believed(found, right, Penalty(value=-5.0, condition=ix.invert(above))).mismatch()


# ---- the condition beside a bias ----------------------------------------------------------------------------------


def learned(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    bias = table[_apart(q, k).clamp(0, 7)].permute(2, 0, 1)[None]
    return _attention(q, k, v, bias.masked_fill(_apart(q, k) > 0, LOWEST))


def masking(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """What the mask's condition lets through, the bias itself may mask."""
    return _attention(q, k, v, bias.masked_fill(_apart(q, k) > 0, LOWEST))


MASKING = torch.zeros(1, 1, LENGTH, LENGTH)
MASKING[..., 5, 1] = -torch.inf
CAUSAL, BELOW = ix.compare("<=", K, Q), ix.compare("<", K, Q)


@pytest.mark.parametrize(
    ("function", "more", "condition", "index"),
    [
        (masked_alibi, (SLOPES, PADDING), BELOW, "b=0, h=0, q=0, k=0"),
        (masked_alibi, (SLOPES, PADDING), CAUSAL, "b=1, h=0, q=3, k=3"),
        (learned, (TABLE.clone().requires_grad_(),), BELOW, "b=0, h=0, q=0, k=0"),
        (masking, (MASKING,), BELOW, "b=0, h=0, q=0, k=0"),
        # Without a bias it is no more than its condition.
        (masking, (MASKING,), CAUSAL, "b=0, h=0, q=5, k=1"),
    ],
)
def test_a_condition_beside_a_bias_is_compared(
    function: Callable[..., Tensor], more: tuple[Tensor, ...], condition: Expr, index: str
) -> None:
    found = planned(function, *qkv(), *more)
    mask, bias, _ = found.found()
    assert [mask.skipped, bias.skipped] == [None, None]
    if function is masked_alibi:
        assert mask.elements == SHAPE[0] * HEADS * LENGTH * LENGTH
    if function is masking and condition == CAUSAL:
        assert mask.formula == "k <= q"
        _believed(found)
    found.check("mask").site.condition = condition
    error = found.mismatch()
    assert (error.what, error.index) == ("recovered mask", index)


def test_what_has_no_value() -> None:
    found = _case(Alibi)
    kind = _kind(found)
    beyond = Load(kind.slopes.tensor, (ix.add(H, Const(HEADS)),), "float")
    _believed(found, dataclasses.replace(kind, slopes=beyond)).mismatch("no value")
    _believed(found, BiasFormula(value=ix.as_float(ix.Size("s99"))))
    assert "s99" in str(found.run("bias").skipped)


# ---- how far rounding takes the sum -------------------------------------------------------------------------------


def _product(q: Tensor, k: Tensor, slopes: Tensor) -> Tensor:
    return slopes[:, None, None] * _apart(q, k)


@pytest.mark.parametrize(
    ("make", "dtype", "expected"),
    [
        # Each rounded operation counts in its own dtype, a conversion in the one that it rounds to.
        (_product, torch.float32, 3 * SINGLE),
        (_product, torch.bfloat16, 3 * HALF),
        (lambda q, k, s: _product(q, k, s) / 3 + s[:, None, None], torch.bfloat16, 5 * HALF),
        (lambda q, k, s: _product(q, k, s.float()).bfloat16(), torch.bfloat16, 3 * HALF + 2 * SINGLE),
        # What only moves elements does not count.
        (lambda q, k, s: _product(q, k, s)[None].expand(2, -1, -1, -1).contiguous(), torch.float32, 3 * SINGLE),
    ],
)
def test_roundings(make: Callable[..., Tensor], dtype: torch.dtype, expected: float) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=make(q, k, slopes))

    found = planned(function, *qkv(dtype=dtype), SLOPES.to(dtype))
    rounding = pairs.rounding(found.check("bias").site, Values(bodies=found.plan.mirrors))
    assert rounding == pytest.approx(expected)


def test_what_is_handed_to_a_body_counts_with_the_widest_rounding_outside() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        bias = _product(q, k, slopes.bfloat16()).float()
        return checkpoint(lambda q, k, v: _attention(q, k, v, bias), q, k, v, use_reentrant=False)

    found = planned(function, *qkv(grad=True), SLOPES)
    assert pairs.rounding(found.check("bias").site, Values(bodies=found.plan.mirrors)) >= 8 * HALF
    assert [v.skipped for v in found.found()] == [None] * 3
