"""One axis changed: what the softmax runs over, what the products contract, and which heads belong together."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.near_miss.checking import (
    BATCH,
    HEAD_DIM,
    HEADS,
    LENGTH,
    SHAPE,
    Case,
    Cases,
    check,
    condition,
    described,
    missed,
    normal,
    qkv,
    tensors,
)

CASES = Cases()
STEPS = "between the product q kᵀ and the softmax stand only"
FOLLOWED = "every axis and every step of the scores can be followed"
OVER_KEYS = "the softmax runs over exactly the free axis of one operand"
CONTRACTS = "the product with v contracts the axis that the softmax ran over"
AFTER = "the softmax is followed by a product with v"
KV_HEADS = 2


def grouped(*more: Tensor) -> list[Tensor]:
    """q, and k and v of fewer heads."""
    kv = (BATCH, KV_HEADS, LENGTH, HEAD_DIM)
    return [*tensors(SHAPE, kv, kv), *more]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).softmax(-1) @ v


# ---- the softmax ----------------------------------------------------------------------------------------------------


CASES.add("softmax_over_the_queries_of_a_square", missed(CONTRACTS), lambda q, k, v: (q @ k.mT * 0.3).softmax(-2) @ v)
CASES.add("softmax_over_the_heads", missed(OVER_KEYS), lambda q, k, v: (q @ k.mT * 0.3).softmax(1) @ v)


@CASES.near_miss(missed(OVER_KEYS))
def softmax_over_queries_and_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).flatten(2).softmax(-1).view(BATCH, HEADS, LENGTH, LENGTH) @ v


@CASES.near_miss(missed(OVER_KEYS))
def softmax_over_a_part_of_the_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).unflatten(-1, (2, 3)).softmax(-1).flatten(3) @ v


# Scores with the keys first, and a softmax over them: attention all the same.
CASES.add("keys_times_queries", described("scale 0.3"), lambda q, k, v: (k @ q.mT * 0.3).softmax(-2).mT @ v)


@CASES.near_miss(missed(OVER_KEYS), inputs=lambda: tensors((BATCH, LENGTH, HEAD_DIM), (HEAD_DIM, 1)))
def pooling_with_one_learned_query(x: Tensor, query: Tensor) -> Tensor:
    return (x @ query).softmax(1).mT @ x


@CASES.near_miss(described("scale 1"), inputs=lambda: tensors((BATCH, LENGTH, HEAD_DIM), (HEAD_DIM, 3), (3, HEAD_DIM)))
def memory_of_learned_keys(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return (x @ keys).softmax(-1) @ values


@CASES.near_miss(missed(AFTER), inputs=lambda: tensors((BATCH, LENGTH, HEAD_DIM), (HEAD_DIM, 4)))
def router(x: Tensor, experts: Tensor) -> Tensor:
    return (x @ experts).softmax(-1).topk(2).values


# ---- the product with v ---------------------------------------------------------------------------------------------


CASES.add("weights_transposed", missed(CONTRACTS), lambda q, k, v: (q @ k.mT * 0.3).softmax(-1).mT @ v)


@CASES.near_miss(described("scale 0.3"), inputs=lambda: tensors(SHAPE, SHAPE, (BATCH, LENGTH, HEADS, HEAD_DIM)))
def v_read_through_an_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,bkhd->bqhd", (q @ k.mT * 0.3).softmax(-1), v)


@CASES.near_miss(described("scale 0.3"), inputs=lambda: tensors(SHAPE, SHAPE, (BATCH, HEADS, HEAD_DIM, LENGTH)))
def v_transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).softmax(-1) @ v.mT


@CASES.near_miss(missed(AFTER), inputs=lambda: tensors(SHAPE, SHAPE, (*SHAPE, 3)))
def axis_of_v_summed_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,bhkde->bhqd", (q @ k.mT * 0.3).softmax(-1), v)


@CASES.near_miss(missed(AFTER), inputs=lambda: tensors(SHAPE, SHAPE, (BATCH, LENGTH, HEAD_DIM)))
def heads_of_the_weights_summed_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,bkd->bqd", (q @ k.mT * 0.3).softmax(-1), v)


@CASES.near_miss(missed(CONTRACTS), inputs=qkv)
def heads_contracted_with_the_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,bhkd->bqd", (q @ k.mT * 0.3).softmax(-1), v)


@CASES.near_miss(missed(FOLLOWED, "leaves 2 axes of v"), inputs=lambda: tensors(SHAPE, SHAPE, (3, *SHAPE)))
def several_values_for_one_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,ebhkd->ebhqd", (q @ k.mT * 0.3).softmax(-1), v)


@CASES.near_miss(missed(AFTER))
def three_operands(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,bhkd,h->bhqd", (q @ k.mT * 0.3).softmax(-1), v, torch.arange(4.0))


@CASES.near_miss(described("scale 0.3"), inputs=lambda: tensors(*[(LENGTH, HEAD_DIM)] * 3))
def einsum_without_an_arrow(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("ij,jd", (torch.einsum("id,jd", q, k) * 0.3).softmax(-1), v)


@CASES.near_miss(described("scale 0.3"), inputs=lambda: tensors(*[(LENGTH, HEAD_DIM)] * 3))
def tensordot(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.tensordot((torch.tensordot(q, k, ([1], [1])) * 0.3).softmax(-1), v, 1)


@CASES.near_miss(described("scale 0.3"), inputs=lambda: tensors(*[(LENGTH, HEAD_DIM)] * 3, (LENGTH, LENGTH)))
def addmm(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, q, k.mT, alpha=0.3, beta=0.5).softmax(-1) @ v


@CASES.near_miss(missed(STEPS, "einsum"), inputs=lambda: tensors((LENGTH, LENGTH, HEAD_DIM), *[(LENGTH, HEAD_DIM)] * 2))
def diagonal_of_the_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("iid,kd->ik", q, k).softmax(-1) @ v


@CASES.near_miss(missed(STEPS, "einsum"), inputs=lambda: tensors((*SHAPE, 3), SHAPE, SHAPE))
def axis_of_q_summed_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqde,bhkd->bhqk", q, k).softmax(-1) @ v


@CASES.near_miss(described("scale 0.3", lowering="reference"), inputs=lambda: tensors(SHAPE, SHAPE, SHAPE[1:]))
def batch_contracted_with_the_head_dim(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores of all rows added up: a head dim of batch · head dim."""
    return (torch.einsum("bhqd,bhkd->hqk", q, k) * 0.3).softmax(-1) @ v


@CASES.near_miss(described("scale 0.3"), inputs=lambda: tensors(*[(BATCH, LENGTH, HEAD_DIM)] * 3))
def no_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.einsum("bqd,bkd->bqk", q, k) * 0.3).softmax(-1) @ v


@CASES.near_miss(missed(OVER_KEYS), inputs=lambda: tensors((BATCH, HEADS, HEAD_DIM), SHAPE, SHAPE))
def no_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhk,bhkd->bhd", torch.einsum("bhd,bhkd->bhk", q, k).softmax(-1), v)


@CASES.near_miss(missed(OVER_KEYS), inputs=lambda: tensors(SHAPE, (BATCH, HEADS, LENGTH, LENGTH, HEAD_DIM), SHAPE))
def keys_of_each_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Relative keys: the query's axis is in both operands."""
    return torch.einsum("bhqd,bhqkd->bhqk", q, k).softmax(-1) @ v


@CASES.near_miss(missed(AFTER), inputs=lambda: tensors(*[SHAPE[1:]] * 3))
def factor_on_the_second_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.baddbmm(torch.zeros(()), (q @ k.mT * 0.3).softmax(-1), v, beta=0, alpha=2.0)


@CASES.near_miss(missed(AFTER), inputs=lambda: tensors(*[SHAPE[1:]] * 4))
def residual_added_by_the_second_product(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    return torch.baddbmm(x, (q @ k.mT * 0.3).softmax(-1), v)


@CASES.near_miss(
    described("scale 0.3", "bias", lowering="reference"),
    inputs=lambda: [*tensors(*[SHAPE[1:]] * 3), normal(HEADS, 1, LENGTH, grad=True)],
)
def bias_added_by_the_first_product(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias, q, k.mT, beta=0.5, alpha=0.3).softmax(-1) @ v


# ---- heads ----------------------------------------------------------------------------------------------------------


@CASES.near_miss(described("scale 0.3"), inputs=grouped)
def heads_repeated_in_groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))


@CASES.near_miss(described("scale 0.3"), inputs=grouped)
def heads_tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Head h reads kv head h % Hkv: no kernel's grouping, so the groups move into the batch."""
    return attend(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))


@CASES.near_miss(described("scale 0.3"), inputs=grouped)
def k_in_groups_and_v_tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k.repeat_interleave(2, 1), v.repeat(1, 2, 1, 1))


@CASES.near_miss(described("scale 0.3"), inputs=lambda: tensors(SHAPE, (BATCH, KV_HEADS, LENGTH, HEAD_DIM), SHAPE))
def only_k_repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k.repeat_interleave(2, 1), v)


@CASES.near_miss(described("scale 0.3"), inputs=lambda: tensors(SHAPE, *[(BATCH, HEADS, 3, HEAD_DIM)] * 2))
def keys_repeated_along_the_sequence(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k.repeat(1, 1, 2, 1), v.repeat_interleave(2, 2))


@CASES.near_miss(described("scale 0.3"), inputs=lambda: [*grouped(), torch.tensor([1, 0, 1, 0])])
def heads_gathered_in_another_order(q: Tensor, k: Tensor, v: Tensor, order: Tensor) -> Tensor:
    return attend(q, k[:, order], v[:, order.flip(0)])


CASES.add("keys_rolled_and_values_flipped", described("scale 0.3"), lambda q, k, v: attend(q, k.roll(1, 2), v.flip(2)))


@CASES.near_miss(described("scale 0.3"))
def k_reinterpreted_without_moving_it(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A view that takes positions for heads."""
    return attend(q, k.reshape(BATCH, LENGTH, HEADS, HEAD_DIM).transpose(1, 2), v)


@CASES.near_miss(described("scale 0.3"), inputs=lambda: tensors(*[(BATCH, LENGTH, HEADS * HEAD_DIM)] * 3))
def heads_innermost_in_the_projection(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(S, D · H) instead of (S, H · D)."""
    q, k, v = (x.unflatten(-1, (HEAD_DIM, HEADS)).permute(0, 3, 1, 2) for x in (q, k, v))
    return attend(q, k, v).permute(0, 2, 3, 1).flatten(2)


@CASES.near_miss(described("scale 0.3"), inputs=lambda: tensors(*[(BATCH, HEADS, LENGTH, 2, 4)] * 3))
def head_dim_of_two_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q.flatten(3), k.transpose(3, 4).flatten(3), v.flatten(3))


# ---- sizes ----------------------------------------------------------------------------------------------------------


def sized(batch: int = 2, heads: int = 4, queries: int = 6, keys: int = 6, head_dim: int = 8) -> list[Tensor]:
    kv = (batch, heads, keys, head_dim)
    return tensors((batch, heads, queries, head_dim), kv, kv)


CASES.add("one_query", described("scale 0.3"), lambda q, k, v: attend(q, k, v), inputs=lambda: sized(queries=1))


@CASES.near_miss(described("scale 0.3"), inputs=lambda: sized(queries=1, keys=1, heads=1))
def one_of_everything(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v)


CASES.add(
    "one_element_a_head", described("scale 0.3"), lambda q, k, v: attend(q, k, v), inputs=lambda: sized(head_dim=1)
)
CASES.add(
    "more_queries_than_keys", described("scale 0.3"), lambda q, k, v: attend(q, k, v), inputs=lambda: sized(queries=17)
)


@CASES.near_miss(described(lowering="reference", because="observed seqlen_q 0"), inputs=lambda: sized(queries=0))
def no_query_at_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v)


@CASES.near_miss(described(lowering="reference", because="observed batch 0"), inputs=lambda: sized(batch=0))
def an_empty_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v)


# ---- masks that are turned ------------------------------------------------------------------------------------------


@CASES.near_miss(described("dense bool"), inputs=lambda: qkv(condition(LENGTH, LENGTH)))
def mask_of_the_transposed_scores(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    scores = (k @ q.mT * 0.3).masked_fill(~kept.mT, -math.inf).mT
    return scores.softmax(-1) @ v


# A later transpose makes queries of the keys, and the product with v takes them for keys.
CASES.add(
    "scores_transposed_before_the_softmax", missed(CONTRACTS), lambda q, k, v: (q @ k.mT * 0.3).mT.softmax(-1).mT @ v
)


@CASES.near_miss(described("scale 0.3", "dense additive"), inputs=lambda: qkv(normal(1, LENGTH, 1, LENGTH)))
def mask_of_scores_in_another_order(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bqhk", q, k) * 0.3 + bias
    return torch.einsum("bqhk,bhkd->bqhd", scores.softmax(-1), v)


@CASES.near_miss(described("scale 0.3", sites=2))
def rows_and_columns(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Two images attend to each other by the same scores, as in LightGlue."""
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * 0.3
    columns = scores.transpose(-2, -1).contiguous().softmax(-1)
    return scores.softmax(-1) @ v, torch.einsum("bhji,bhjd->bhid", columns.transpose(-2, -1), v)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_axes(case: Case) -> None:
    check(case)
