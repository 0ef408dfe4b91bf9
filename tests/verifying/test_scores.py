"""What is added to the scores against what was proved of it: right kinds pass, and every sort of wrong one is found."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Load
from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.reporting.verifications import Verification
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
from attn_compiler.verifying import pairs, running
from attn_compiler.verifying.values import Values
from tests.verifying.planning import LENGTH, SHAPE, Planned, Tensor, planned, qkv

B, H, Q, K = map(Index, "bhqk")
HEADS = SHAPE[1]
LOWEST = torch.finfo(torch.float32).min
PADDING = torch.tensor([[1] * LENGTH, [1, 1, 1, 0, 0, 1]])
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


def masked_alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, attention_mask: Tensor) -> Tensor:
    """A causal and padded mask in the same tensor as the bias."""
    allowed = (_apart(q, k) <= 0) & (attention_mask != 0)[:, None, None, :]
    return _attention(q, k, v, torch.where(allowed, slopes[:, None, None] * _apart(q, k), LOWEST))


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


Attention = Callable[..., Tensor]
BIAS = torch.linspace(-2.0, 2.0, HEADS * LENGTH).reshape(1, HEADS, 1, LENGTH)

CASES: dict[type[ProvedScore], tuple[Attention, tuple[Tensor, ...]]] = {
    Alibi: (alibi, (SLOPES,)),
    RelativeBias: (buckets, (TABLE,)),
    GatheredBias: (gathered, (TABLE, INDEX)),
    RegionPenalty: (regions, ()),
    Penalty: (penalty, ()),
    Bias: (ready_made, (BIAS,)),
    BiasFormula: (formula, ()),
}


def _checked(found: Planned) -> Verification:
    (bias,) = (v for v in running.run_checks(found.plan, found.args).found if v.subject == "bias")
    return bias


def _kind(found: Planned) -> ProvedScore:
    spec = found.check("bias").site.spec
    assert spec is not None
    (kind,) = spec.score.proved
    return kind


def _believed(found: Planned, *kinds: ProvedScore) -> Planned:
    """The plan, had these kinds been proved."""
    site = found.check("bias").site
    assert site.spec is not None
    site.spec = dataclasses.replace(site.spec, score=dataclasses.replace(site.spec.score, proved=kinds))
    return found


def _mismatch(found: Planned) -> VerificationMismatch:
    with pytest.raises(VerificationMismatch) as caught:
        running.run_checks(found.plan, found.args)
    assert caught.value.what == "recovered bias"
    return caught.value


def test_every_kind_has_a_case() -> None:
    assert set(CASES) == set(ProvedScore.__args__)  # type: ignore[attr-defined]


@pytest.mark.in_turns
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_right_kinds_pass(kind: type[ProvedScore], dtype: torch.dtype) -> None:
    function, more = CASES[kind]
    more = tuple(x.to(dtype) if x.is_floating_point() else x for x in more)
    found = planned(function, *qkv(dtype=dtype), *more)
    assert isinstance(_kind(found), kind)
    result = _checked(found)
    assert result.skipped is None
    assert result.elements >= LENGTH
    assert result.formula == _kind(found).words
    assert result.error is not None
    assert result.allowed is not None
    assert result.error <= result.allowed


def _shifted(kind: ProvedScore) -> ProvedScore:
    """A wrong kind of the same sort: off by a position, a row of the table, or a little in size."""
    match kind:
        case Alibi():
            return dataclasses.replace(kind, position=ix.add(kind.position, ix.mul(K, K)))
        case RelativeBias() | GatheredBias():
            row, head = kind.at
            return dataclasses.replace(kind, at=(ix.apply("mod", ix.add(row, ix.ONE), Const(8)), head))
        case Bias():
            return dataclasses.replace(kind, weight=kind.weight * 1.1)
        case Penalty():
            return dataclasses.replace(kind, condition=ix.compare(">=", K, Q))
        case RegionPenalty():
            return dataclasses.replace(kind, of_key=ix.apply("floordiv", K, Const(3)))
        case BiasFormula():
            return dataclasses.replace(kind, value=ix.mul(kind.value, Const(1.1)))


@pytest.mark.in_turns
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_wrong_kinds_are_found(kind: type[ProvedScore], dtype: torch.dtype) -> None:
    function, more = CASES[kind]
    more = tuple(x.to(dtype) if x.is_floating_point() else x for x in more)
    found = planned(function, *qkv(dtype=dtype), *more)
    wrong = _shifted(_kind(found))
    error = _mismatch(_believed(found, wrong))
    assert error.formula == wrong.words


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_kinds_that_say_too_much_are_found(kind: type[ProvedScore]) -> None:
    """Their sum is what is compared."""
    function, more = CASES[kind]
    found = planned(function, *qkv(), *more)
    right = _kind(found)
    _mismatch(_believed(found, right, right))


def test_the_worst_element_is_named() -> None:
    found = planned(alibi, *qkv(), SLOPES)
    right = _kind(found)
    assert isinstance(right, Alibi)
    wrong_at: Expr = ix.apply("and", ix.compare("==", K, Const(2)), ix.compare("==", Q, Const(4)))
    wrong = BiasFormula(value=ix.as_float(ix.as_int(ix.apply("and", wrong_at, ix.compare("==", H, Const(3))))))
    error = _mismatch(_believed(found, right, wrong))
    assert error.index == "b=0, h=3, q=4, k=2"
    assert error.expected.startswith("-0.125 (")
    assert error.observed == "0.875"
    assert error.differing.startswith("1 of ")


@pytest.mark.parametrize("most", [1, 7, 2**24])
def test_slices_of_any_size_find_the_same(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(pairs, "MOST_PAIRS", most)
    found = planned(alibi, *qkv(), SLOPES)
    assert _checked(found).elements == HEADS * LENGTH * LENGTH
    _mismatch(_believed(found, _shifted(_kind(found))))


def test_what_is_masked_is_the_masks() -> None:
    """A bias may be anything where the pair is masked, and nothing but itself elsewhere."""
    found = planned(masked_alibi, *qkv(), SLOPES, PADDING)
    kept = (PADDING != 0)[:, None, :] & torch.ones(LENGTH, LENGTH).tril().bool()
    assert _checked(found).elements == HEADS * int(kept.sum())
    right = _kind(found)
    above = ix.compare(">", K, Q)
    _checked(_believed(found, right, Penalty(value=-5.0, condition=above)))
    _mismatch(_believed(found, right, Penalty(value=-5.0, condition=ix.invert(above))))


# ---- the condition beside a bias ----------------------------------------------------------------------------------


def _mask_mismatch(found: Planned, condition: Expr) -> VerificationMismatch:
    found.check("mask").site.condition = condition
    with pytest.raises(VerificationMismatch) as caught:
        running.run_checks(found.plan, found.args)
    assert caught.value.what == "recovered mask"
    return caught.value


def test_a_condition_beside_a_bias_is_compared() -> None:
    found = planned(masked_alibi, *qkv(), SLOPES, PADDING)
    mask, _, _ = running.run_checks(found.plan, found.args).found
    assert (mask.subject, mask.skipped, mask.elements) == ("mask", None, SHAPE[0] * HEADS * LENGTH * LENGTH)
    condition = found.check("mask").site.condition
    assert condition is not None
    strict = ix.apply("and", condition, ix.compare("<", K, Q))
    assert _mask_mismatch(found, strict).index == "b=0, h=0, q=0, k=0"
    assert _mask_mismatch(found, ix.compare("<=", K, Q)).index == "b=1, h=0, q=3, k=3"


def test_a_condition_beside_a_learned_bias_is_compared() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        bias = table[_apart(q, k).clamp(0, 7)].permute(2, 0, 1)[None]
        return _attention(q, k, v, bias.masked_fill(_apart(q, k) > 0, LOWEST))

    found = planned(function, *qkv(), TABLE.clone().requires_grad_())
    assert [v.skipped for v in running.run_checks(found.plan, found.args).found[:2]] == [None, None]
    assert _mask_mismatch(found, ix.compare("<", K, Q)).index == "b=0, h=0, q=0, k=0"


def test_a_ready_made_tensor_may_mask_too() -> None:
    """What the mask's condition lets through, the bias itself may mask."""

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return _attention(q, k, v, bias.masked_fill(_apart(q, k) > 0, LOWEST))

    bias = torch.zeros(1, 1, LENGTH, LENGTH)
    bias[..., 5, 1] = -torch.inf
    found = planned(function, *qkv(), bias)
    mask, bias, _ = running.run_checks(found.plan, found.args).found
    assert (mask.skipped, bias.skipped) == (None, None)
    assert mask.formula == "k <= q"
    assert _mask_mismatch(_believed(found), ix.compare("<=", K, Q)).index == "b=0, h=0, q=5, k=1"


# ---- what can't be compared ---------------------------------------------------------------------------------------


def test_a_size_that_is_not_known_is_skipped() -> None:
    found = planned(alibi, *qkv(), SLOPES)
    _believed(found, BiasFormula(value=ix.as_float(ix.Size("s99"))))
    assert "s99" in str(_checked(found).skipped)


def test_a_formula_that_reads_beyond_a_tensor_is_a_mismatch() -> None:
    found = planned(alibi, *qkv(), SLOPES)
    kind = _kind(found)
    assert isinstance(kind, Alibi)
    assert isinstance(kind.slopes, Load)
    beyond = Load(kind.slopes.tensor, (ix.add(H, Const(HEADS)),), "float")
    error = _mismatch(_believed(found, dataclasses.replace(kind, slopes=beyond)))
    assert "no value" in error.observed


# ---- how far rounding takes the sum -------------------------------------------------------------------------------


def _slopes_times_apart(q: Tensor, k: Tensor, slopes: Tensor) -> Tensor:
    return slopes[:, None, None] * _apart(q, k)


def _rounding(make: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> float:
    def function(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=make(q, k, slopes))

    found = planned(function, *qkv(dtype=dtype), SLOPES.to(dtype))
    return pairs.rounding(found.check("bias").site, Values(bodies=found.plan.mirrors))


def test_each_rounded_operation_counts_in_its_own_dtype() -> None:
    assert _rounding(_slopes_times_apart) == pytest.approx(3 * SINGLE)
    assert _rounding(_slopes_times_apart, torch.bfloat16) == pytest.approx(3 * HALF)
    more = _rounding(lambda q, k, s: _slopes_times_apart(q, k, s) / 3 + s[:, None, None], torch.bfloat16)
    assert more == pytest.approx(5 * HALF)


def test_a_conversion_counts_in_the_dtype_that_it_rounds_to() -> None:
    single = _rounding(lambda q, k, s: _slopes_times_apart(q, k, s.float()).bfloat16(), torch.bfloat16)
    assert single == pytest.approx(3 * HALF + 2 * SINGLE)


def test_what_only_moves_elements_does_not_count() -> None:
    assert _rounding(
        lambda q, k, s: _slopes_times_apart(q, k, s)[None].expand(2, -1, -1, -1).contiguous()
    ) == pytest.approx(3 * SINGLE)


def test_what_is_handed_to_a_body_counts_with_the_widest_rounding_outside() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        bias = _slopes_times_apart(q, k, slopes.bfloat16()).float()

        def body(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

        return checkpoint(body, q, k, v, use_reentrant=False)

    found = planned(function, *(x.requires_grad_() for x in qkv()), SLOPES)
    check = found.check("bias")
    assert pairs.rounding(check.site, Values(bodies=found.plan.mirrors)) >= 8 * HALF
    assert [v.skipped for v in running.run_checks(found.plan, found.args).found] == [None] * 3
