"""What is added to scores, recovered: every kind, and what looks like one, against the tensor that the model made."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.spec import added_scores
from attn_compiler.spec.added_scores import (
    Alibi,
    Bias,
    BiasFormula,
    GatheredBias,
    LogBuckets,
    RegionPenalty,
    RelativeBias,
)
from tests.passes.compiling import mark
from tests.passes.recovered_sites import Recovered, recover

B, H, S, KEYS, D = 3, 2, 5, 7, 8
LOWEST = torch.finfo(torch.float32).min
MADE = Callable[..., Tensor]


def recovered(make: MADE, *inputs: Tensor, dynamic: bool = False, heads: int = H, keys: int = KEYS) -> Recovered:
    """The one attention that adds make(q, k, *inputs), recovered and held against what it adds."""

    def function(q: Tensor, k: Tensor, *inputs: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, attn_mask=make(q, k, *inputs))

    q, k = torch.randn(B, heads, S, D), torch.randn(B, heads, keys, D)
    if dynamic:
        inputs = tuple(mark(x.clone(), (B, keys)) if not x.requires_grad else x for x in inputs)
        mark(q, (B, S)), mark(k, (B, keys))
    (found,) = recover(function, q, k, *inputs)
    assert found.worst() < 1e-5, found.words
    return found


def rows(q: Tensor) -> Tensor:
    return torch.arange(q.shape[2])[:, None]


def columns(k: Tensor) -> Tensor:
    return torch.arange(k.shape[2])[None, :]


def apart(q: Tensor, k: Tensor) -> Tensor:
    return columns(k) - rows(q)


SLOPES = torch.tensor([0.5, 0.25])


# ---- ALiBi --------------------------------------------------------------------------------------------------------


def _bloom_slopes(heads: int) -> Tensor:
    """As transformers' Bloom computes them, for a number of heads that is no power of two."""
    closest = 2 ** math.floor(math.log2(heads))
    base = torch.full((), 2 ** (-(2 ** -(math.log2(closest) - 3))))
    slopes = torch.pow(base, torch.arange(1, 1 + closest, dtype=torch.int32))
    extra = torch.full((), 2 ** (-(2 ** -(math.log2(2 * closest) - 3))))
    powers = torch.arange(1, 1 + 2 * (heads - closest), 2, dtype=torch.int32)
    return torch.cat([slopes, torch.pow(extra, powers)])


def _mpt(heads: int, longest: int) -> Tensor:
    positions = torch.arange(1 - longest, 1, dtype=torch.int32).view(1, 1, 1, longest)
    base = torch.arange(1, heads + 1, dtype=torch.int64).float() * (8 / heads)
    return (positions * (1.0 / torch.pow(2, base)).view(1, heads, 1, 1)).squeeze(0)


ALIBI: dict[str, tuple[MADE, str]] = {
    "slopes times distance": (lambda q, k, s: s[:, None, None] * apart(q, k), "ALiBi inputs_0[h] · (k - q)"),
    "times the distance as floats": (
        lambda q, k, s: s[:, None, None] * apart(q, k).float(),
        "ALiBi inputs_0[h] · (k - q)",
    ),
    "slopes times keys": (lambda q, k, s: s[:, None, None] * columns(k), "ALiBi inputs_0[h] · k"),
    "both ways": (lambda q, k, s: -s[:, None, None] * apart(q, k).abs(), "ALiBi slopes(h) · |k - q|"),
    "scaled": (lambda q, k, s: (s[:, None, None] * columns(k)) / 3.0, "ALiBi slopes(h) · k"),
    "computed slopes": (
        lambda q, k, s: _bloom_slopes(3)[:2, None, None] * columns(k) + 0 * s[0],
        "ALiBi slopes(h) · k",
    ),
    "sliced from the longest": (lambda q, k, s: _mpt(H, 16)[:, :, max(0, 16 - k.shape[2]) :] + 0 * s[0], ""),
}


@pytest.mark.in_turns
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ALIBI)
def test_alibi(name: str, dynamic: bool) -> None:
    make, words = ALIBI[name]
    found = recovered(make, SLOPES, dynamic=dynamic)
    kinds = [kind for kind in found.meaning.scores if isinstance(kind, Alibi)]
    assert len(kinds) == 1, found.words
    assert words in found.words or words == ""
    assert found.meaning.kinds == ()
    assert found.meaning.condition is not None


@pytest.mark.parametrize("dynamic", [False, True])
def test_alibi_inside_baddbmm_with_batch_and_heads_in_one_axis(dynamic: bool) -> None:
    """Bloom's: a causal mask is added to it later."""

    def function(q: Tensor, k: Tensor) -> Tensor:
        batch, heads, seqlen = q.shape[0], 3, q.shape[2]
        alibi = (_bloom_slopes(heads)[:, None, None] * columns(k)).repeat(batch, 1, 1)
        scores = alibi.baddbmm(q.reshape(-1, seqlen, D), k.reshape(-1, seqlen, D).mT, beta=1.0, alpha=0.3)
        mask = torch.where(columns(k) <= rows(q), 0.0, LOWEST)
        weights = F.softmax(scores.view(batch, heads, seqlen, seqlen) + mask, dim=-1)
        return weights.view(-1, seqlen, seqlen) @ k.reshape(-1, seqlen, D)

    q, k = torch.randn(B, 3, S, D), torch.randn(B, 3, S, D)
    if dynamic:
        mark(q, (S,)), mark(k, (S,))
    (found,) = recover(function, q, k)
    assert found.worst() < 1e-6
    assert found.words == "ALiBi slopes(h) · k"
    assert [kind.words for kind in found.meaning.kinds] == ["causal"]


def test_alibi_counted_from_an_attention_mask_is_read_at_run_time() -> None:
    def make(q: Tensor, k: Tensor, mask: Tensor, slopes: Tensor) -> Tensor:
        positions = ((mask.cumsum(-1) - 1) * mask)[:, None, None, :]
        return slopes[:, None, None] * positions

    mask = torch.tensor([[1] * KEYS, [0, 0] + [1] * (KEYS - 2), [1, 1, 0] * 2 + [1]])
    (kind,) = recovered(make, mask, SLOPES).meaning.scores
    assert isinstance(kind, Alibi)
    assert "cumsum[b, k] - 1) · inputs_0[b, k]" in kind.words


def test_learned_slopes_are_alibi_that_wants_a_gradient() -> None:
    slopes = SLOPES.clone().requires_grad_()
    (kind,) = recovered(lambda q, k, s: s[:, None, None] * apart(q, k), slopes).meaning.scores
    assert isinstance(kind, Alibi)
    assert kind.requires_grad
    assert kind.words.endswith("with gradient")


def test_slopes_of_one_position_are_added() -> None:
    def function(q: Tensor, k: Tensor, s: Tensor) -> Tensor:
        alibi = s[:, None, None] * columns(k)
        return F.softmax(q @ k.mT + alibi + alibi, -1) @ k

    (found,) = recover(function, torch.randn(B, H, S, D), torch.randn(B, H, KEYS, D), SLOPES)
    assert found.worst() < 1e-6
    assert [type(kind) for kind in found.meaning.scores] == [Alibi]


def test_what_is_added_several_times_is_one_kind_with_a_weight() -> None:
    (kind,) = recovered(lambda q, k, bias: bias * 2.0 + bias - 0.5 * bias, torch.randn(H, S, KEYS)).meaning.scores
    assert isinstance(kind, Bias)
    assert kind.weight == 2.5


# ---- tables -------------------------------------------------------------------------------------------------------


def t5_bucket(distance: Tensor, both_ways: bool = True, count: int = 8, furthest: int = 20) -> Tensor:
    """As transformers' T5 computes it."""
    buckets: Any = 0
    if both_ways:
        count //= 2
        buckets += (distance > 0).to(torch.long) * count
        distance = torch.abs(distance)
    else:
        distance = -torch.min(distance, torch.zeros_like(distance))
    exact = count // 2
    wide = exact + (torch.log(distance.float() / exact) / math.log(furthest / exact) * (count - exact)).to(torch.long)
    wide = torch.min(wide, torch.full_like(wide, count - 1))
    buckets += torch.where(distance < exact, distance, wide)
    return buckets


def t5(q: Tensor, k: Tensor, table: Tensor, change: Callable[[Tensor], Tensor] = lambda row: row, **how: Any) -> Tensor:
    return F.embedding(change(t5_bucket(apart(q, k), **how)), table).permute(2, 0, 1).unsqueeze(0)


@pytest.mark.in_turns
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("both_ways", [True, False])
def test_t5(both_ways: bool, dynamic: bool) -> None:
    def make(q: Tensor, k: Tensor, table: Tensor) -> Tensor:
        return t5(q, k, table, both_ways=both_ways)

    (kind,) = recovered(make, torch.randn(8, H).requires_grad_(), dynamic=dynamic, keys=23).meaning.scores
    assert isinstance(kind, RelativeBias)
    assert kind.buckets == LogBuckets(count=8, max_distance=20, both_ways=both_ways)
    assert kind.requires_grad
    assert "T5 relative bias (8 buckets up to 20" in kind.words
    assert kind.table == "inputs_0"


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize(("count", "furthest"), [(8, 20), (32, 128), (16, 64), (12, 40)])
def test_t5s_buckets_are_what_the_kind_says(count: int, furthest: int, both_ways: bool) -> None:
    distances = torch.arange(-200, 200)
    wanted = t5_bucket(distances, both_ways, count, furthest)
    buckets = LogBuckets(count=count, max_distance=furthest, both_ways=both_ways)
    assert [buckets.bucket(int(d)) for d in distances] == wanted.tolist()


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, row: torch.where(apart(q, k) == 3, row + 1, row),
        lambda q, k, row: torch.clamp(row, max=6),
        lambda q, k, row: row * 1 + (apart(q, k) == -2),
    ],
    ids=["one distance", "a bucket less", "one more"],
)
def test_buckets_of_another_formula_are_a_relative_bias_and_not_t5s(change: Callable[..., Tensor]) -> None:
    (kind,) = recovered(
        lambda q, k, table: t5(q, k, table, lambda row: change(q, k, row)), torch.randn(9, H)
    ).meaning.scores
    assert isinstance(kind, RelativeBias)
    assert kind.buckets is None
    assert "T5" not in kind.words


def test_a_bucket_of_one_pair_makes_it_no_relative_bias() -> None:
    def make(q: Tensor, k: Tensor, table: Tensor) -> Tensor:
        pair = (rows(q) == 1) & (columns(k) == 3)
        return t5(q, k, table, lambda row: torch.where(pair, 0, row))

    (kind,) = recovered(make, torch.randn(8, H)).meaning.scores
    assert isinstance(kind, GatheredBias)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_table_of_clipped_distances(dynamic: bool) -> None:
    def make(q: Tensor, k: Tensor, table: Tensor) -> Tensor:
        return table[:, apart(q, k).clamp(-4, 4) + 4]

    (kind,) = recovered(make, torch.randn(H, 9), dynamic=dynamic).meaning.scores
    assert isinstance(kind, RelativeBias)
    assert kind.words == "relative bias inputs_0[h, f(k - q)]"


def test_a_table_by_the_product_of_positions_is_gathered_and_not_relative() -> None:
    def make(q: Tensor, k: Tensor, table: Tensor) -> Tensor:
        return table[rows(q) * columns(k)].permute(2, 0, 1)

    (kind,) = recovered(make, torch.randn(S * KEYS, H)).meaning.scores
    assert isinstance(kind, GatheredBias)


@pytest.mark.parametrize("with_mask", [False, True])
def test_swin(with_mask: bool) -> None:
    """A table through a ready-made index, and -100 between regions of a window that was shifted."""
    side, windows = 2, 4
    area = side * side
    index = torch.randint(0, 9, (area * area,))

    def function(q: Tensor, table: Tensor, index: Tensor) -> Tensor:
        bias = table[index].view(area, area, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        if with_mask:
            place = torch.arange(side * windows)
            region = (place >= 5).long() + (place >= 7).long()
            parts = region.to(q.dtype).view(windows // 2, area)
            mask = parts.unsqueeze(1) - parts.unsqueeze(2)
            mask = mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)
            mask = mask.unsqueeze(1).unsqueeze(0).expand(q.shape[0] // (windows // 2), -1, -1, -1, -1)
            bias = bias + mask.reshape(-1, 1, area, area)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=bias)

    (found,) = recover(function, torch.randn(6, H, area, D), torch.randn(9, H), index)
    assert found.worst() < 1e-5
    assert [type(kind) for kind in found.meaning.scores] == [GatheredBias] + [RegionPenalty] * with_mask
    assert found.meaning.kinds == ()
    assert "table[index[k + 4·q], h]" in found.words


def test_indices_of_run_time_positions() -> None:
    def make(q: Tensor, k: Tensor, table: Tensor, position: Tensor) -> Tensor:
        relative = position[:, None, :] - position[:, : q.shape[2], None] + 20
        return F.embedding(relative, table).permute(0, 3, 1, 2)

    position = torch.arange(KEYS).flip(0).repeat(B, 1)
    (kind,) = recovered(make, torch.randn(40, H), position).meaning.scores
    assert isinstance(kind, GatheredBias)


# ---- the rest -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "along"),
    [((1, H, 1, KEYS), "hk"), ((H, S, KEYS), "hqk"), ((B, 1, 1, KEYS), "bk"), ((S, 1), "q"), ((B, H, S, KEYS), "bhqk")],
)
@pytest.mark.parametrize("expanded", [False, True])
def test_a_ready_made_bias_and_what_it_truly_depends_on(shape: tuple[int, ...], along: str, expanded: bool) -> None:
    def make(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
        return bias.expand(B, H, S, KEYS) if expanded else bias

    found = recovered(make, torch.randn(shape))
    (kind,) = found.meaning.scores
    assert isinstance(kind, Bias)
    assert kind.varies_along == along
    assert kind.shape == tuple(n if axis in along else 1 for axis, n in zip("bhqk", (B, H, S, KEYS), strict=True))
    assert found.meaning.reason is not None
    assert "may mask too" in found.meaning.reason


def test_a_number_that_is_too_near_to_zero_to_mask() -> None:
    mask = torch.tensor([[1] * KEYS, [0] * 2 + [1] * (KEYS - 2), [1] * KEYS])
    found = recovered(lambda q, k, m: torch.where(m[:, None, None, :] == 0, -1000.0, 0.0), mask)
    (kind,) = found.meaning.scores
    assert isinstance(kind, added_scores.Penalty)
    assert kind.words.startswith("-1000 where ")
    assert found.meaning.kinds == ()


def test_a_mask_that_is_multiplied_to_a_large_number_is_not_taken_apart() -> None:
    """transformers 4.57 in T5, of a mask that may hold any number. Next to 3e38 the relative bias would be rounded away."""

    def function(x: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        distance = torch.arange(S)[None, :] - torch.arange(S)[:, None] + S
        bias = (
            F.embedding(distance, table).permute(2, 0, 1)[None]
            + (1.0 - mask[:, None, None, :]) * torch.finfo(x.dtype).min
        )
        return F.scaled_dot_product_attention(x, x, x, attn_mask=bias)

    (site,) = recover(function, x=torch.randn(B, H, S, D), table=torch.randn(2 * S, H), mask=torch.ones(B, S))
    assert {type(kind) for kind in site.meaning.scores} == {RelativeBias, BiasFormula}
    assert site.worst() < 1e-5, site.words


def test_a_formula_without_a_name() -> None:
    (kind,) = recovered(lambda q, k: torch.log(apart(q, k).abs().float() + 1.0) * 0.5).meaning.scores
    assert isinstance(kind, BiasFormula)


#: what looks like ALiBi and is none: (how it is made, its inputs)
NO_ALIBI: dict[str, tuple[MADE, tuple[Tensor, ...]]] = {
    "slopes of queries": (lambda q, k, s: s[:, :, None] * apart(q, k), (torch.randn(H, S),)),
    "one slope for all heads": (lambda q, k, s: s * apart(q, k), (torch.tensor(0.5),)),
    "squares": (lambda q, k, s: s[:, None, None] * (apart(q, k) * apart(q, k)), (SLOPES,)),
    "positions of heads": (lambda q, k, s: s[:, None, None] * (columns(k) + torch.arange(H)[:, None, None]), (SLOPES,)),
    "but for one pair": (
        lambda q, k, s: torch.where((rows(q) == 1) & (columns(k) == 2), 0.0, s[:, None, None] * apart(q, k)),
        (SLOPES,),
    ),
    "queries alone": (lambda q, k, s: s[:, None, None] * rows(q).expand(-1, k.shape[2]), (SLOPES,)),
    "every other key": (lambda q, k, s: s[:, None, None] * (columns(k) // 2), (SLOPES,)),
}


@pytest.mark.parametrize("name", NO_ALIBI)
def test_what_is_no_alibi(name: str) -> None:
    make, inputs = NO_ALIBI[name]
    found = recovered(make, *inputs)
    assert found.meaning.scores
    assert not any(isinstance(kind, Alibi) for kind in found.meaning.scores), found.words


def test_alibi_that_is_edited_after_it_was_made_is_not_alibi() -> None:
    def make(q: Tensor, k: Tensor, s: Tensor) -> Tensor:
        alibi = s[:, None, None] * apart(q, k)
        alibi[0, 1, 2] = 3.0
        return alibi

    found = recovered(make, SLOPES)
    assert not any(isinstance(kind, Alibi) for kind in found.meaning.scores), found.words


# ---- with a mask --------------------------------------------------------------------------------------------------

MASK = torch.tensor([[1] * KEYS, [0] * 2 + [1] * (KEYS - 2), [1] * KEYS])


def _padding(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return (columns(k) <= rows(q) + 1) & (mask[:, None, None, :] != 0)


TOGETHER: dict[str, MADE] = {
    "added": lambda q, k, m, s: s[:, None, None] * apart(q, k) + torch.where(_padding(q, k, m), 0.0, LOWEST),
    "added the other way": lambda q, k, m, s: (
        torch.zeros(()).masked_fill(~_padding(q, k, m), -torch.inf) + s[:, None, None] * apart(q, k)
    ),
    "chosen": lambda q, k, m, s: torch.where(_padding(q, k, m), s[:, None, None] * apart(q, k), LOWEST),
    "filled": lambda q, k, m, s: (s[:, None, None] * apart(q, k)).masked_fill(~_padding(q, k, m), LOWEST),
    "filled, then scaled": lambda q, k, m, s: (
        (s[:, None, None] * apart(q, k)).masked_fill(~_padding(q, k, m), LOWEST) * 0.5
    ),
}


@pytest.mark.in_turns
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", TOGETHER)
def test_a_mask_in_the_same_tensor_is_told_apart(name: str, dynamic: bool) -> None:
    found = recovered(TOGETHER[name], MASK, SLOPES, dynamic=dynamic)
    assert [type(kind) for kind in found.meaning.scores] == [Alibi]
    words = " ∧ ".join(kind.words for kind in found.meaning.kinds)
    assert "causal from" in words
    assert "key padding" in words
    assert found.meaning.reason is None
    assert found.meaning.condition is not None


def test_what_masks_by_rounded_numbers_is_not_taken_for_a_mask() -> None:
    """0.1 · 3 in float32 is not 0.1 · 3 of a formula: which pairs are equal depends on how it is rounded."""

    def make(q: Tensor, k: Tensor, s: Tensor) -> Tensor:
        allowed = (columns(k) - rows(q)) * 0.1 <= 0.3
        return torch.where(allowed, s[:, None, None] * apart(q, k), LOWEST)

    found = recovered(make, SLOPES)
    assert found.meaning.kinds == ()
    assert found.meaning.reason is not None
    assert "rounded" in found.meaning.reason
    assert [type(kind) for kind in found.meaning.scores] == [Bias]


def test_every_kind_is_tested_above() -> None:
    named = {Alibi, RelativeBias, GatheredBias, RegionPenalty, added_scores.Penalty, Bias, BiasFormula}
    assert named == set(added_scores.PROVED_KINDS)
