"""One softmax over the scores of two sets of keys: one attention, if every part of the weights meets the values of its own keys."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.near_miss.checking import Case, Cases, Function, Judge, check, condition, described, missed, refused, tensors

CASES = Cases()
JOINED = "between the product q kᵀ and the softmax"
B, H, S, D = 2, 2, 9, 8
MEMORY = 5


def _inputs(*more: Tensor) -> list[Tensor]:
    of_memory = (B, H, MEMORY, D)
    return [*tensors((B, H, S, D), (B, H, S, D), (B, H, S, D), of_memory, of_memory), *more]


def near_miss(judge: Judge, *more: Tensor, dynamic: bool | None = None) -> Callable[[Function], Function]:
    return CASES.near_miss(judge, inputs=lambda: _inputs(*more), dynamic=dynamic)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) * 0.3


def earlier() -> Tensor:
    return torch.arange(S)[None, :] <= torch.arange(S)[:, None]


def weigh(q: Tensor, k: Tensor, mk: Tensor) -> Tensor:
    return torch.cat([scores(q, mk), scores(q, k)], -1).softmax(-1)


# ---- one attention --------------------------------------------------------------------------------------------------


@near_miss(described("none", "scale 0.3"))
def joined_values(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    return weigh(q, k, mk) @ torch.cat([mv, v], 2)


@near_miss(described("none", "scale 0.3"))
def parts_by_slices(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    w = weigh(q, k, mk)
    return w[..., :MEMORY] @ mv + w[..., MEMORY:] @ v


@near_miss(described("none", "scale 0.3"))
def slices_from_the_end_added_in_place(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    w = weigh(q, k, mk)
    out = torch.matmul(w[:, :, :, :-S], mv)
    out += torch.matmul(w[:, :, :, -S:], v)
    return out


@near_miss(described("none", "scale 0.3"))
def parts_by_a_split(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    of_memory, own = weigh(q, k, mk).split([MEMORY, S], -1)
    return own @ v + of_memory @ mv


@near_miss(described("none", "scale 0.3"), dynamic=True)
def parts_of_any_length(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    of_memory, own = weigh(q, k, mk).split([mk.shape[2], k.shape[2]], -1)
    return own @ v + of_memory @ mv


@near_miss(described("scale 0.3"))
def one_set_is_causal(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    own = scores(q, k).masked_fill(~earlier(), -math.inf)
    w = F.softmax(torch.cat([scores(q, mk), own], -1), dim=-1, dtype=torch.float32).to(q.dtype)
    return w[..., :MEMORY] @ mv + w[..., MEMORY:] @ v


@near_miss(described("dense bool"), condition(S, S), condition(B, 1, 1, MEMORY))
def each_set_has_a_mask(
    q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor, kept: Tensor, of_memory: Tensor
) -> Tensor:
    own = scores(q, k).masked_fill(~kept, -1e9)
    others = scores(q, mk).masked_fill(~of_memory, -math.inf)
    return torch.cat([own, others], -1).softmax(-1) @ torch.cat([v, mv], 2)


@near_miss(described("additive"), torch.randn(H, S, S))
def one_set_has_a_bias(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor, bias: Tensor) -> Tensor:
    return torch.cat([scores(q, k) + bias, scores(q, mk)], -1).softmax(-1) @ torch.cat([v, mv], 2)


@near_miss(described("scale 0.5"))
def three_sets_scaled_together(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    parts = [q @ k.mT, q @ mk.mT, q @ v.mT]
    a, b, c = (torch.cat(parts, dim=3) / 2).softmax(-1).split([S, MEMORY, S], dim=3)
    return a @ v + (b @ mv + c @ k)


@near_miss(described("none", "scale 0.3"))
def products_by_name(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    of_memory, own = (torch.einsum("bhid,bhjd->bhij", q, x) * 0.3 for x in (mk, k))
    w = torch.cat((of_memory, own), dim=-1).softmax(dim=-1)
    a, b = w[..., :MEMORY], w[..., MEMORY:]
    return torch.einsum("bhij,bhjd->bhid", a, mv) + torch.einsum("bhij,bhjd->bhid", b, v)


@near_miss(described("none", "scale 0.3"))
def products_by_name_of_positions_first(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    q, k, v, mk, mv = (x.transpose(1, 2) for x in (q * 0.3, k, v, mk, mv))
    parts = [torch.einsum("bihd,bjhd->bhij", q, x) for x in (k, mk)]
    w = F.softmax(torch.cat(parts, -1), dim=-1)
    return torch.einsum("bhij,bjhd->bihd", w, torch.cat([v, mv], 1))


@near_miss(described("none", "scale 0.3", sites=2))
def a_layer_after_another(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    for _ in range(2):
        q = weigh(q, k, mk) @ torch.cat([mv, v], 2)
    return q


# ---- none, or not read as one ---------------------------------------------------------------------------------------


@near_miss(missed(JOINED))
def parts_that_meet_one_another(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    """The parts are cut elsewhere than the scores were joined."""
    w = torch.cat([scores(q, k), scores(q, mk)], -1).softmax(-1)
    return w[..., :MEMORY] @ mv + w[..., MEMORY:] @ v


@near_miss(missed(JOINED))
def one_part_is_read_twice(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    w = torch.cat([scores(q, k), scores(q, mk)], -1).softmax(-1)
    return w[..., :S] @ v + w[..., :S] @ k


@near_miss(missed(JOINED))
def products_by_other_names(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    own = torch.einsum("bhid,bhjd->bhij", q, k)
    return torch.cat([own, torch.einsum("bhjd,bhid->bhji", q, mk)], -1).softmax(-1) @ torch.cat([v, mv], 2)


@near_miss(missed(JOINED))
def a_memory_of_each_query(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    """Each query has keys of its own."""
    memory = mk[:, :, None] * q[..., None, :]
    both = torch.cat([scores(q, k), torch.einsum("bhid,bhijd->bhij", q, memory)], -1)
    return both.softmax(-1) @ torch.cat([v, mv], 2)


@near_miss(missed(JOINED))
def values_that_the_queries_are_summed_over(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    w = weigh(q, k, mk)
    return torch.einsum("bhij,bhid->bhjd", w, v)


@near_miss(missed(JOINED))
def parts_that_are_subtracted(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    w = weigh(q, k, mk)
    return w[..., MEMORY:] @ v - w[..., :MEMORY] @ mv


@near_miss(missed(JOINED))
def sums_of_parts_with_a_factor(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    w = weigh(q, k, mk)
    return torch.add(w[..., MEMORY:] @ v, w[..., :MEMORY] @ mv, alpha=2)


@near_miss(missed(JOINED))
def sets_that_other_queries_ask(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    return torch.cat([scores(q, k), scores(q.sin(), mk)], -1).softmax(-1) @ torch.cat([v, mv], 2)


@near_miss(missed(JOINED))
def sets_of_two_scales(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    return torch.cat([scores(q, k), q @ mk.mT * 0.2], -1).softmax(-1) @ torch.cat([v, mv], 2)


@near_miss(missed(JOINED))
def a_mask_before_a_scale(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    own = (q @ k.mT).masked_fill(~earlier(), -50.0) * 0.3
    return torch.cat([own, scores(q, mk)], -1).softmax(-1) @ torch.cat([v, mv], 2)


@near_miss(missed(JOINED))
def scores_of_one_set_are_returned(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> tuple[Tensor, Tensor]:
    own = scores(q, k)
    return torch.cat([own, scores(q, mk)], -1).softmax(-1) @ torch.cat([v, mv], 2), own


@near_miss(missed(JOINED))
def weights_are_returned(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> tuple[Tensor, Tensor]:
    w = weigh(q, k, mk)
    return w @ torch.cat([mv, v], 2), w


@near_miss(missed(JOINED))
def fewer_queries_than_numbers_of_a_head(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    q = q[:, :, :3]
    return torch.cat([scores(q, k), scores(q, mk)], -1).softmax(-1) @ torch.cat([v, mv], 2)


@near_miss(missed(JOINED))
def keys_that_are_written_in_between(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    kept, q, mk = k.detach().clone(), q.detach(), mk.detach()
    joined = torch.cat([scores(q, kept), scores(q, mk)], -1)
    kept.zero_()
    return joined.softmax(-1) @ torch.cat([v, mv], 2) + kept


@near_miss(missed(JOINED))
def one_set_without_a_gradient(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    with torch.no_grad():
        own = scores(q, k)
    return torch.cat([own, scores(q, mk)], -1).softmax(-1) @ torch.cat([v, mv], 2)


@near_miss(missed("the product with v contracts the axis that the softmax ran over"))
def a_softmax_over_queries(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    return torch.cat([scores(q, k), scores(q, mk)], -1).softmax(-2) @ torch.cat([v, mv], 2)


@near_miss(missed(JOINED))
def sets_of_queries(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    """Joined along the queries."""
    joined = torch.cat([scores(q, k), scores(mk, k)], -2)
    return joined.softmax(-1) @ v


@near_miss(refused("masks by -500"))
def a_set_that_is_not_masked_for_certain(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    own = scores(q, k).masked_fill(~earlier(), -500.0)
    return torch.cat([own, scores(q, mk)], -1).softmax(-1) @ torch.cat([v, mv], 2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_near_misses(case: Case) -> None:
    check(case)
