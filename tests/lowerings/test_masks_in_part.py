"""Masks of which a part can not be read, on each kernel that runs here: the numbers and gradients of the model's own code.

Where a kernel applies parts of a mask, nothing above the diagonal is visited, and the tensor that it reads says the unread part alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.reporting.facts import SiteReport
from tests.interpreted_target import triton_interpreted
from tests.lowerings.against_float64 import assert_same
from tests.passes.compiling import Compiled, compiled

B, HEADS, D = 2, 3, 16
Attend = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with triton_interpreted():
        yield


def _causal(queries: int, keys: int) -> Tensor:
    return torch.arange(keys) <= torch.arange(queries)[:, None] + (keys - queries)


def _left_out(chosen: Tensor, keys: int) -> Tensor:
    """As DeepSeek V3.2: (B, 1, Sq, Skv), True where a key is not chosen."""
    shape = (chosen.shape[0], chosen.shape[1], keys)
    return chosen.new_ones(shape, dtype=torch.bool).scatter(-1, chosen.long(), False).unsqueeze(1)


def _called(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, padding: Tensor) -> Tensor:
    mask = _causal(q.shape[2], k.shape[2]) & padding[:, None, None, :].bool()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask & ~_left_out(chosen, k.shape[2]))


def _added(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, padding: Tensor) -> Tensor:
    lowest = torch.finfo(q.dtype).min
    mask = _causal(q.shape[2], k.shape[2]) & padding[:, None, None, :].bool()
    added = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, lowest)
    added = added.masked_fill(_left_out(chosen, k.shape[2]), lowest)
    weights = F.softmax(q @ k.mT * D**-0.5 + added, -1, dtype=q.dtype)
    return weights @ v


def _filled(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, padding: Tensor) -> Tensor:
    """The parts in places of their own."""
    scores = (q @ k.mT * D**-0.5).masked_fill(~_causal(q.shape[2], k.shape[2]), torch.finfo(q.dtype).min)
    scores = scores.masked_fill(
        _left_out(chosen, k.shape[2]) | ~padding[:, None, None, :].bool(), torch.finfo(q.dtype).min
    )
    return F.softmax(scores, -1) @ v


def _rounded(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, padding: Tensor) -> Tensor:
    """What can not be read compares numbers that are rounded, so that no tensor says it alone."""
    near = torch.rand(q.shape[2], k.shape[2], generator=torch.Generator().manual_seed(5)) * 0.1 < 0.06
    near |= torch.arange(k.shape[2]) == 0
    mask = _causal(q.shape[2], k.shape[2]) & padding[:, None, None, :].bool() & near
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _rounded_and_added(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, padding: Tensor) -> Tensor:
    """The same as numbers, and finite ones."""
    near = torch.rand(q.shape[2], k.shape[2], generator=torch.Generator().manual_seed(6)) * 0.1 < 0.06
    near |= torch.arange(k.shape[2]) == 0
    mask = _causal(q.shape[2], k.shape[2]) & padding[:, None, None, :].bool() & near
    added = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
    return F.softmax(q @ k.mT * D**-0.5 + added, -1) @ v


def _of_one_sort(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, padding: Tensor) -> Tensor:
    """What can not be read is the same for all batch rows."""
    mask = _causal(q.shape[2], k.shape[2]) & padding[:, None, None, :].bool()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask & ~_left_out(chosen, k.shape[2])[:1])


FORMS: dict[str, Attend] = {
    "called": _called,
    "added": _added,
    "filled": _filled,
    "of one sort": _of_one_sort,
    "rounded": _rounded,
    "rounded and added": _rounded_and_added,
}


def _given(queries: int, keys: int, seed: int, *, grad: bool = True) -> list[Tensor]:
    """Of the keys before the padding, some are chosen for each query, and the first one always: each query has a key."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((HEADS, queries), (HEADS, keys), (HEADS, keys))
    q, k, v = (torch.randn(B, *size, D, generator=generator).requires_grad_(grad) for size in sizes)
    scores = torch.randn(B, queries, keys, generator=generator)
    scores[..., 0] = torch.inf
    padding = torch.ones(B, keys, dtype=torch.int64)
    padding[1, keys - keys // 4 :] = 0
    return [q, k, v, scores.topk(keys // 3 + 1, -1).indices.int(), padding]


def _site(run: Compiled) -> SiteReport:
    (site,) = [site for report in run.reports for site in report.sites]
    return site


@pytest.mark.in_turns
@pytest.mark.parametrize("lowering", ["triton", "math", "reference"])
@pytest.mark.parametrize("form", FORMS)
def test_forward_and_backward(form: str, lowering: str) -> None:
    run = compiled(FORMS[form], lowering=lowering)
    queries, keys = (67, 67) if lowering == "triton" else (13, 13)
    assert_same(run, FORMS[form], lambda: _given(queries, keys, seed=len(form)))
    mask = _site(run).spec.mask
    assert [type(kind).__name__ for kind in mask.held] == ["Causal", "KeyPadding"]
    assert mask.reason is not None
    assert (mask.rest is None) is form.startswith("rounded")


@pytest.mark.in_turns
@pytest.mark.parametrize("lowering", ["triton", "sdpa_cpu_flash", "math"])
@pytest.mark.parametrize(("queries", "keys"), [(70, 131), (33, 200), (5, 77)])
def test_odd_lengths_without_gradients(queries: int, keys: int, lowering: str) -> None:
    run = compiled(_called, lowering=lowering)
    assert_same(run, _called, lambda: _given(queries, keys, seed=keys, grad=False))
    assert next(kind.words for kind in _site(run).spec.mask.held) == "causal (bottom-right)"


@pytest.mark.parametrize("form", ["called", "added", "rounded"])
def test_a_few_queries_over_a_cache(form: str) -> None:
    run = compiled(FORMS[form], lowering="decode")
    assert_same(run, FORMS[form], lambda: _given(4, 77, seed=3, grad=False))
    assert _site(run).spec.mask.is_partial


@pytest.mark.in_turns
@pytest.mark.parametrize("form", ["added", "filled", "rounded and added"])
@pytest.mark.parametrize("lowering", ["triton", "math"])
def test_queries_without_keys_get_what_the_model_gives_them(form: str, lowering: str) -> None:
    """A batch row is padding alone, and a query has chosen what comes behind it."""

    def given() -> list[Tensor]:
        made = _given(35, 35, seed=9)
        made[3][0, 4] = 20
        made[4][1] = 0
        return made

    run = compiled(FORMS[form], lowering=lowering)
    assert_same(run, FORMS[form], given)


@pytest.mark.parametrize("form", ["called", "of one sort"])
def test_what_no_query_may_see_is_not_read(form: str) -> None:
    """A kernel by tiles reads no padding beyond the last tile with keys, and no number there gets into a result."""

    def given() -> list[Tensor]:
        made = _given(40, 200, seed=11)
        made[4][:, 100:] = 0
        with torch.no_grad():
            made[1][:, :, 140:], made[2][:, :, 140:] = torch.nan, torch.nan
        return made

    def cleared(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
        return FORMS[form](q, k.nan_to_num(0.0), v.nan_to_num(0.0), *others)

    run = compiled(FORMS[form], lowering="triton")
    assert_same(run, cleared, given)


def test_the_kernel_reads_the_unread_part_alone() -> None:
    """One for all batch rows here, and the model's own mask is not made."""
    run = compiled(_of_one_sort, lowering="triton")
    given = _given(40, 300, seed=13, grad=False)
    run(*given)
    text = run.text
    assert "scaled_dot_product_attention" not in text
    site = _site(run)
    assert site.spec.mask.dense is not None
    assert site.spec.mask.dense.shape == (B, 1, 40, 300)
    assert text.count("logical_and") == 0


def test_rules_that_every_length_is_held_to() -> None:
    """After the first length, one graph serves all others."""
    run = compiled(_called, lowering="triton", dynamic=None)
    for queries in (35, 40, 51, 67):
        assert_same(run, _called, lambda queries=queries: _given(queries, queries, seed=queries, grad=False))
    assert len(run.reports) == 2
    masks = [site.spec.mask for report in run.reports for site in report.sites]
    assert [mask.rest is not None for mask in masks] == [True, True]
