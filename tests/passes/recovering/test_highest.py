"""Which added numbers are known to leave a row's highest alone, and which are near to them and are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attn_compiler
from attn_compiler.reporting.facts import SiteReport
from tests.near_miss.checking import assert_same, normal

B, H, S, D = 3, 2, 6, 32
#: a length for each row, the last of which has none
MASK = (torch.arange(S) < torch.tensor([[S], [3], [0]])).long()
#: what is added, of a mask (B, S)
Make = Callable[[Tensor], Tensor]


def site_of(make: Make, *, attend: Callable[..., Tensor] | None = None, dim: int = D) -> SiteReport:
    """The site of an attention with make(mask), whose outputs and gradients are eager's."""

    def called(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return _called(q, k, v, make(mask))

    def inputs() -> list[Tensor]:
        return [*(normal(B, H, S, dim, seed=i) for i in range(3)), MASK.clone()]

    assert_same(attend or called, inputs)
    ((site,),) = (report.sites for report in attn_compiler.reports())
    return site


def _called(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=added)


def _of_keys(mask: Tensor) -> Tensor:
    return mask[:, None, None, :]


PROVED: dict[str, Make] = {
    "diffusers'": lambda m: (1 - _of_keys(m).float()) * -10000.0,
    "of truth values": lambda m: (1 - _of_keys(m).bool().float()) * -10000.0,
    "chosen": lambda m: torch.where(_of_keys(m) > 0, 0.0, -10000.0),
    "of two numbers": lambda m: torch.where(_of_keys(m) > 0, 9000.0, -4000.0),
    "truth values as whole numbers": lambda m: ((1 - _of_keys(m).bool().long()) * -10000).float(),
    "in half precision": lambda m: ((1 - _of_keys(m).bfloat16()) * -10000.0).float(),
    "for each head": lambda m: (1 - m.float()).repeat_interleave(H, 0).view(B, H, 1, S) * -10000.0,
    "for each query": lambda m: ((1 - _of_keys(m).float()) * -10000.0).expand(B, H, S, S),
    "turned round": lambda m: _of_keys(m).float() * 10000.0,
    "of one row": lambda m: (1 - m[:1, None, None].float()) * -10000.0,
    "sums of masks": lambda m: (2 - _of_keys(m) - _of_keys(m.flip(0))).float() * -10000.0,
}

NEAR_MISSES: dict[str, Make] = {
    "too near to zero": lambda m: (1 - _of_keys(m).float()) * -5000.0,
    "so low that scores are half lost": lambda m: (1 - _of_keys(m).float()) * -1e6,
    "a mask of fractions": lambda m: (1 - _of_keys(m) * 0.5) * -10000.0,
    "divided": lambda m: _of_keys(m) / 3 * 10000.0,
    "for pairs": lambda m: (1 - (_of_keys(m) * m[:, None, :, None]).float()) * -10000.0,
    "up to the diagonal": lambda m: (1 - _of_keys(m).float()) * -10000.0 + torch.ones(S, S).triu(1) * -2.0,
    "beside a bias": lambda m: (1 - _of_keys(m).float()) * -10000.0 + torch.arange(S) * 0.5,
    "of numbers that are close": lambda m: torch.where(_of_keys(m) > 0, -9000.0, -10000.0),
    "whole numbers that may wrap around": lambda m: ((1 - _of_keys(m)) * -10000).float(),
    "a mask of floats": lambda m: (1 - torch.sin(_of_keys(m).float())) * -10000.0,
}


@pytest.mark.parametrize("form", PROVED)
def test_proved(form: str) -> None:
    site = site_of(PROVED[form])
    assert site.spec.score.by_highest
    assert (site.spec.mask.reason, site.spec.mask.added) == (None, None)
    assert "whose highest number masks the others (proved)" in str(site.spec.score.added)


@pytest.mark.parametrize("form", NEAR_MISSES)
def test_near_misses(form: str) -> None:
    assert not site_of(NEAR_MISSES[form]).spec.score.by_highest


def test_wide_scores_are_no_less_than_the_numbers() -> None:
    """A product of queries and keys is taken to be below 16384, of which a head dim of 8 leaves 5793."""
    assert not site_of(PROVED["diffusers'"], dim=8).spec.score.by_highest


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * D**-0.5


OTHERS: dict[str, Callable[..., Tensor]] = {
    "written out": lambda q, k, v, m: F.softmax(_scores(q, k) + PROVED["diffusers'"](m), -1) @ v,
    "with a diagonal": lambda q, k, v, m: (
        F.softmax((_scores(q, k) + PROVED["diffusers'"](m)).masked_fill(torch.ones(S, S).triu(1) > 0, -torch.inf), -1)
        @ v
    ),
    "times what is learned": lambda q, k, v, m: _called(q, k, v, _of_keys(m) * 10000.0 * q[..., :1, :1]),
    "written to behind": lambda q, k, v, m: _written(q, k, v, PROVED["diffusers'"](m)),
}


def _written(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> Tensor:
    added.log1p_()
    return _called(q, k, v, added.nan_to_num(0.5))


@pytest.mark.parametrize("form", OTHERS)
def test_other_attentions(form: str) -> None:
    assert not site_of(PROVED["diffusers'"], attend=OTHERS[form]).spec.score.by_highest


# ---- numbers beside which no score counts ---------------------------------------------------------------------------

LOWEST = torch.finfo(torch.float32).min
#: lengths, and numbers that a mask is not made of: twice its number is the largest there is, three times infinite
WHOLE = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [0] * 6, [0, 1, 2, 1, 0, 1], [0, -1, -1, 0, -2, 0]])

AT_LOWEST: dict[str, Make] = {
    "BERT's": lambda m: (1.0 - _of_keys(m)) * LOWEST,
    "of whole numbers": lambda m: (1 - _of_keys(m)) * LOWEST,
    "cast first": lambda m: (1.0 - _of_keys(m).float()) * LOWEST,
    "at -1e9": lambda m: (1.0 - _of_keys(m)) * -1e9,
    "of half precision": lambda m: ((1.0 - _of_keys(m).bfloat16()) * torch.finfo(torch.bfloat16).min).float(),
    "a lowest number that half precision rounds": lambda m: ((1.0 - _of_keys(m)) * LOWEST).bfloat16().float(),
    "sums of masks": lambda m: (2 - _of_keys(m) - _of_keys(m.flip(1))) * LOWEST,
}
#: of these a row may be -inf as a whole, which a softmax that is written out makes no number of, and kernels 0
INFINITE = ("a lowest number that half precision rounds", "sums of masks")
NOT_AT_LOWEST: dict[str, Make] = {
    "a score counts beside it": lambda m: (1.0 - _of_keys(m)) * -1e6,
    "the lowest number of float16": lambda m: ((1.0 - _of_keys(m).half()) * -65504.0).float(),
    "for pairs": lambda m: (1.0 - _of_keys(m) * m[:, None, :, None]) * LOWEST,
    "halves": lambda m: (1.0 - _of_keys(m) * 0.5) * LOWEST,
    "beside a bias": lambda m: (1.0 - _of_keys(m)) * LOWEST + torch.arange(S) * 0.5,
    "twice": lambda m: (1.0 - _of_keys(m)) * -1e30 + (1.0 - _of_keys(m.flip(1))) * -1e30,
    "one number for all keys": lambda m: (1.0 - _of_keys(m)[..., :1]) * LOWEST,
    "wrapped around": lambda m: ((1 - _of_keys(m)) * torch.iinfo(torch.int64).min).float(),
}


def _at_lowest(make: Make, *, is_call: bool, grad: bool = False, dtype: torch.dtype = torch.float32) -> SiteReport:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        added = make(mask).to(dtype)
        return _called(q, k, v, added) if is_call else (_scores(q, k) + added).softmax(-1) @ v

    def inputs() -> list[Tensor]:
        return [*(normal(len(WHOLE), H, S, D, seed=i, grad=grad, dtype=dtype) for i in range(3)), WHOLE.clone()]

    assert_same(attend, inputs)
    ((site,),) = (report.sites for report in attn_compiler.reports())
    return site


@pytest.mark.parametrize(
    ("form", "is_call"),
    [(form, is_call) for form in AT_LOWEST for is_call in (True, False) if is_call or form not in INFINITE],
)
def test_numbers_beside_which_no_score_counts(form: str, is_call: bool) -> None:
    site = _at_lowest(AT_LOWEST[form], is_call=is_call)
    assert site.spec.score.by_highest
    assert site.spec.mask.added is None


@pytest.mark.parametrize("is_call", [True, False])
@pytest.mark.parametrize("form", NOT_AT_LOWEST)
def test_near_to_such_numbers(form: str, is_call: bool) -> None:
    assert not _at_lowest(NOT_AT_LOWEST[form], is_call=is_call).spec.score.by_highest


def test_in_training_they_are_added() -> None:
    """q and k get a gradient from rows without a 0."""
    site = _at_lowest(AT_LOWEST["BERT's"], is_call=False, grad=True)
    assert not site.spec.score.by_highest
    assert "holds whole numbers" in str(site.spec.mask.added)
