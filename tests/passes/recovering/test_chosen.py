"""Keys by their indices: found where a mask leaves no others, and said nothing of where it may."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.index_expr import Index
from attn_compiler.spec.masks import MaskSpec
from tests.passes.compiling import compiled

B, S, KEYS, COUNT = 2, 5, 9, 3
LOWEST = torch.finfo(torch.float32).min
Make = Callable[[Tensor], Tensor]


def _top(scores: Tensor) -> Tensor:
    return scores.topk(COUNT, -1).indices


def _ones(dtype: torch.dtype = torch.bool, number: float = 1.0, queries: int = S) -> Tensor:
    return torch.full((B, queries, KEYS), number, dtype=dtype)


def _scores(queries: int = S) -> Tensor:
    return torch.randn(B, queries, KEYS, generator=torch.Generator().manual_seed(queries))


def _mask(make: Make, *, queries: int = S) -> MaskSpec:
    """The mask of an attention with make(scores) for its mask."""

    def function(q: Tensor, k: Tensor, scores: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, attn_mask=make(scores)[:, None])

    q, k = torch.randn(B, 1, queries, 8), torch.randn(B, 1, KEYS, 8)
    run = compiled(function)
    torch.testing.assert_close(run(q, k, _scores(queries)), function(q, k, _scores(queries)))
    return run.site.spec.mask


FORMS: dict[str, Make] = {
    "DeepSeek V3.2": lambda x: ~_ones().scatter(-1, _top(x).int().long(), False),
    "truth values": lambda x: torch.zeros(B, S, KEYS, dtype=torch.bool).scatter(2, _top(x), True),
    "written in place": lambda x: torch.zeros_like(x, dtype=torch.bool).scatter_(-1, _top(x), True),
    "in a tensor of its own": lambda x: _in_place(x),
    "added": lambda x: _ones(torch.float32, -torch.inf).scatter(-1, _top(x), 0.0),
    "added, in place": lambda x: _ones(torch.float32, -torch.inf).scatter_(-1, _top(x), 0.0),
    "lowest numbers": lambda x: _ones(torch.float32, LOWEST).scatter(-1, _top(x), 0.0),
    "compared": lambda x: _ones(torch.float32, -torch.inf).scatter_(-1, _top(x), 0.0) == 0.0,
    "whole numbers": lambda x: torch.zeros(B, S, KEYS, dtype=torch.int64).scatter(-1, _top(x), 1) != 0,
    "beside others": lambda x: ~_ones().scatter(-1, _top(x), False) & (torch.arange(KEYS) < KEYS - 2),
    "asked of twice": lambda x: (
        ~_ones().scatter(-1, _top(x), False) & (_causal() | ~_ones().scatter(-1, _top(x), False))
    ),
    "smallest ones": lambda x: ~_ones().scatter(-1, x.topk(COUNT, largest=False, sorted=False).indices, False),
}


def _in_place(scores: Tensor) -> Tensor:
    mask = torch.zeros(B, S, KEYS, dtype=torch.bool)
    mask.scatter_(-1, _top(scores), True)
    return mask & (torch.arange(KEYS) >= 0)


def _causal() -> Tensor:
    return torch.arange(KEYS) <= torch.arange(S)[:, None] + KEYS - S


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    mask = _mask(FORMS[form])
    assert mask.chosen is not None
    assert (mask.chosen.count, mask.chosen.distinct) == (COUNT, True)
    assert mask.chosen.at == (Index("b"), Index("q"))


@pytest.mark.parametrize("form", FORMS)
def test_no_key_counts_but_those_of_the_row(form: str) -> None:
    made = FORMS[form](_scores())
    rows = _scores().topk(COUNT, -1, largest=form != "smallest ones").indices
    allowed = made if made.dtype == torch.bool else made == 0
    for b, q, k in itertools.product(range(B), range(S), range(KEYS)):
        assert not allowed[b, q, k] or k in rows[b, q].tolist()


def test_one_query_of_a_cache() -> None:
    mask = _mask(lambda x: ~_ones(queries=1).scatter(-1, _top(x), False), queries=1)
    assert mask.chosen is not None
    assert mask.chosen.words.endswith("[b, 0, :]")
    assert mask.reason is None


def test_blocks_of_keys() -> None:
    def make(scores: Tensor) -> Tensor:
        top = scores[..., : KEYS // 3].topk(2, -1).indices
        kept = torch.zeros(B, S, KEYS // 3, dtype=torch.bool).scatter(-1, top, True)
        return kept.repeat_interleave(3, -1)

    chosen = _mask(make).chosen
    assert chosen is not None
    assert (chosen.block, chosen.count, chosen.is_within, chosen.distinct) == (3, 2, False, True)


def test_a_column_that_is_cut_off() -> None:
    def make(scores: Tensor) -> Tensor:
        top = scores.topk(COUNT, -1)
        left = top.indices.masked_fill(top.values < 0.5, KEYS)
        return torch.zeros(B, S, KEYS + 1, dtype=torch.bool).scatter(-1, left, True)[..., :KEYS]

    chosen = _mask(make).chosen
    assert chosen is not None
    assert (chosen.block, chosen.is_within, chosen.distinct) == (1, False, False)
    within = _mask(FORMS["truth values"]).chosen
    assert within is not None
    assert within.is_within


#: where other keys may count, or the indices are not of the query's own row
NEAR_MISSES: dict[str, Make] = {
    "all others": lambda x: _ones().scatter(-1, _top(x), False),
    "or another": lambda x: ~_ones().scatter(-1, _top(x), False) | (torch.arange(KEYS) == 4),
    "a base of run time": lambda x: (x > 0).scatter(-1, _top(x), True),
    "along the queries": lambda x: torch.zeros(B, S, KEYS, dtype=torch.bool).scatter(1, x.topk(COUNT, 1).indices, True),
    "fewer rows": lambda x: torch.zeros(B, S, KEYS, dtype=torch.bool).scatter(-1, _top(x)[:, :3], True),
    "written to behind": lambda x: _written_behind(x),
    "values of run time": lambda x: torch.zeros(B, S, KEYS).scatter(-1, _top(x), x) > 0.5,
    "neither number": lambda x: torch.full((B, S, KEYS), 2).scatter(-1, _top(x), 1) == 0,
    "low and added": lambda x: _ones(torch.float32, -3.0).scatter(-1, _top(x), 0.0),
}


def _written_behind(scores: Tensor) -> Tensor:
    mask = torch.zeros(B, S, KEYS, dtype=torch.bool).scatter_(-1, _top(scores), True)
    mask[:, :, 1] = True
    return mask


@pytest.mark.parametrize("form", NEAR_MISSES)
def test_near_misses(form: str) -> None:
    assert _mask(NEAR_MISSES[form]).chosen is None


def test_indices_that_may_repeat() -> None:
    """They need no top k, and a row may have a key twice."""
    for indices in (
        lambda x: (x[..., :COUNT].abs() * 7).long() % KEYS,
        lambda x: _top(x) // 2,
        lambda x: torch.cat([_top(x), _top(x)[..., :1]], -1),
        lambda x: x.transpose(1, 2).topk(COUNT, 1).indices.transpose(1, 2),
    ):
        mask = _mask(lambda x, indices=indices: ~_ones().scatter(-1, indices(x), False))
        assert mask.chosen is not None
        assert not mask.chosen.distinct


def test_a_tensor_that_is_added_is_read_as_its_two_numbers() -> None:
    mask = _mask(FORMS["added"])
    assert mask.dense is not None
    assert mask.dense.dtype == "float32"
    assert mask.reason is not None
    assert "holds an element for each query and key" in mask.reason
