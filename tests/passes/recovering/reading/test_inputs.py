"""Masks that enter a body: read where they are made, unless something may have changed them on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_compiler.passes.graph import mirror
from attn_compiler.spec.added_scores import GatheredBias
from tests.passes.compiling import Compiled, compiled

B, H, S, D = 2, 2, 5, 8
SHAPE = (B, H, S, D)
PADDING = torch.tensor([[1] * S, [1] * (S - 2) + [0] * 2])
#: a body that calls share runs behind AOTAutograd alone
SHARED: dict[str, Any] = {"inner": "aot_eager"}


def _causal() -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).tril()


def _attention(q: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def _layer(q: Tensor, mask: Tensor) -> Tensor:
    return checkpoint(_attention, q, mask, use_reentrant=False)


def check(function: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> Compiled:
    """Output and gradient equal eager's."""
    q = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    eager, own = q.clone().requires_grad_(), q.clone().requires_grad_()
    wanted = function(eager, *(x.clone() for x in inputs))
    run = compiled(function, **options)
    got = run(own, *(x.clone() for x in inputs))
    torch.testing.assert_close(got, wanted)
    wanted.sin().sum().backward()
    got.sin().sum().backward()
    torch.testing.assert_close(own.grad, eager.grad)
    return run


def _forward(function: Callable[[Tensor], Tensor]) -> Compiled:
    """Output equals eager's. PyTorch refuses the backward of what saved a mask that was written to."""
    q = torch.randn(SHAPE, requires_grad=True)
    run = compiled(function)
    torch.testing.assert_close(run(q), function(q))
    return run


def _words(run: Compiled) -> list[str]:
    return [" ∧ ".join(kind.words for kind in site.spec.mask.read) for site in run.report.sites]


# ---- followed -----------------------------------------------------------------------------------------------------


def test_a_causal_mask_of_the_caller_is_is_causal_in_the_body() -> None:
    def function(q: Tensor) -> Tensor:
        mask = _causal()
        return _layer(_layer(q, mask), mask)

    run = check(function)
    assert run.site.spec.mask.is_causal
    assert run.site.spec.mask.dense is None
    assert len(run.site.modules) == 2


def test_what_a_condition_loads_has_the_callers_name() -> None:
    def function(q: Tensor, attention_mask: Tensor) -> Tensor:
        return _layer(q, _causal() & attention_mask[:, None, None, :].bool())

    assert _words(check(function, PADDING)) == ["causal ∧ key padding attention_mask[b, k]"]


def test_a_mask_goes_through_bodies_in_bodies() -> None:
    def inner(q: Tensor, mask: Tensor) -> Tensor:
        return _layer(q, mask & True).sin()

    def function(q: Tensor) -> Tensor:
        return checkpoint(inner, q, _causal() & torch.ones(S, dtype=torch.bool), use_reentrant=False)

    def outer(q: Tensor, mask: Tensor) -> Tensor:
        return _layer(q, mask.view(1, 1, S, S)).sin()

    def through(q: Tensor) -> Tensor:
        return checkpoint(outer, q, _causal(), use_reentrant=False)

    assert check(through).site.spec.mask.is_causal
    assert check(function).site.spec.mask.is_causal


def test_a_body_goes_on_from_what_the_caller_began() -> None:
    def windowed(q: Tensor, mask: Tensor) -> Tensor:
        near = torch.arange(S)[:, None] - torch.arange(S)[None, :] < 3
        return _attention(q, mask & near)

    def function(q: Tensor) -> Tensor:
        return checkpoint(windowed, q, _causal(), use_reentrant=False)

    assert _words(check(function)) == ["causal ∧ window (2 back)"]


def test_each_body_has_the_mask_that_it_is_given() -> None:
    def function(q: Tensor) -> Tensor:
        return _layer(_layer(q, _causal()), _causal().mT)

    causal, other = sorted(check(function).report.sites, key=lambda site: not site.spec.mask.is_causal)
    assert causal.spec.mask.is_causal
    assert not other.spec.mask.is_causal


def test_a_table_of_the_caller_at_indices_that_the_body_made() -> None:
    """What the body made of data and did not read further keeps its name, beside the names that the caller gives."""

    def function(q: Tensor, table: Tensor) -> Tensor:
        def body(q: Tensor) -> Tensor:
            n = q.shape[2]
            order = torch.arange(n)
            row = (order[:, None] - order[order - n]).clamp(0, 3)
            return F.scaled_dot_product_attention(q, q, q, attn_mask=table[row])

        return checkpoint(body, q, use_reentrant=False)

    run = check(function, torch.randn(4))
    (bias,) = run.site.spec.score.proved
    assert isinstance(bias, GatheredBias)


def test_sizes_are_those_of_the_caller() -> None:
    def function(q: Tensor) -> Tensor:
        n = q.size(2)
        return _layer(q, torch.arange(n)[None, :] <= torch.arange(n)[:, None])

    run = compiled(function, dynamic=True)
    for n in (5, 7):
        q = torch.randn(B, H, n, D, requires_grad=True)
        torch.testing.assert_close(run(q), function(q))
    assert all(site.spec.mask.is_causal for report in run.reports for site in report.sites)


def test_a_mask_edited_as_a_whole_before_the_call_is_what_it_then_is() -> None:
    def function(q: Tensor, attention_mask: Tensor) -> Tensor:
        mask = _causal().expand(B, 1, S, S).clone()
        mask &= attention_mask[:, None, None, :].bool()
        return _layer(q, mask)

    assert _words(check(function, PADDING)) == ["causal ∧ key padding attention_mask[b, k]"]


def test_a_mask_edited_after_the_call_was_the_old_one_at_the_call() -> None:
    def function(q: Tensor) -> Tensor:
        mask = _causal()
        first = _layer(q, mask)
        mask.logical_not_()
        return first + _layer(q, mask.logical_or(torch.ones(S, dtype=torch.bool).diag()))

    assert sum(site.spec.mask.is_causal for site in _forward(function).report.sites) == 1


def test_a_caller_without_attention_gets_a_mirror_only_for_a_mask() -> None:
    def run(function: Callable[[Tensor], Tensor]) -> int:
        with mock.patch.object(mirror, "build", wraps=mirror.build) as build:
            compiled(function)(torch.randn(SHAPE, requires_grad=True))
        return build.call_count

    assert run(lambda q: _layer(q, _causal())) == 2
    unmasked = lambda q: F.scaled_dot_product_attention(q, q, q)  # noqa: E731
    assert run(lambda q: checkpoint(unmasked, q + 1, use_reentrant=False)) == 1


# ---- a body that is called more than once -------------------------------------------------------------------------

nested = torch.compiler.nested_compile_region


def test_a_shared_body_whose_calls_agree() -> None:
    shared = nested(_attention)

    def function(q: Tensor) -> Tensor:
        mask = _causal()
        return shared(shared(q, mask), mask)

    assert check(function, **SHARED).site.spec.mask.is_causal


def test_a_shared_body_whose_calls_do_not_agree_loads_its_input() -> None:
    shared = nested(_attention)

    def function(q: Tensor) -> Tensor:
        return shared(shared(q, _causal()), _causal().mT.contiguous())

    for site in check(function, **SHARED).report.sites:
        assert not site.spec.mask.is_causal
        assert site.spec.mask.dense is not None


def test_a_shared_body_whose_calls_load_other_tensors_loads_its_input() -> None:
    shared = nested(_attention)

    def function(q: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return shared(shared(q, a[:, None, None, :].bool()), b[:, None, None, :].bool())

    (site,) = check(function, PADDING, PADDING.flip(0), **SHARED).report.sites
    assert "a[b, k]" not in site.spec.mask.words
    assert site.spec.mask.dense is not None


# ---- the mask was changed, in a way that can be read ------------------------------------------------------------------


def _edited_before_the_call(q: Tensor) -> Tensor:
    mask = _causal()
    mask[1, 3] = True
    return _layer(q, mask)


def _edited_through_a_view(q: Tensor) -> Tensor:
    mask = _causal()
    mask[2:].logical_not_()
    mask[:, 0] = True
    return _layer(q, mask)


def _edited_inside(q: Tensor) -> Tensor:
    def body(q: Tensor, mask: Tensor) -> Tensor:
        mask[1, 3] = True
        return _attention(q, mask)

    return checkpoint(body, q, _causal(), use_reentrant=False)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (_edited_before_the_call, "causal ∨ (k = 3 ∧ q = 1)"),
        (_edited_through_a_view, "(causal ∧ q <= 1) ∨ (q + 1 <= k ∧ 2 <= q) ∨ k = 0"),
        (_edited_inside, "causal ∨ (k = 3 ∧ q = 1)"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_mask_is_read_with_what_was_written_to_it(function: Callable[[Tensor], Tensor], words: str) -> None:
    assert _words(_forward(function)) == [words]


# ---- near misses: the mask was changed ----------------------------------------------------------------------------


def _edited_inside_under_another_name(q: Tensor) -> Tensor:
    def body(q: Tensor, mask: Tensor, again: Tensor) -> Tensor:
        again[0] = True
        return _attention(q, mask)

    mask = _causal()
    return checkpoint(body, q, mask, mask[1:], use_reentrant=False)


def _edited_by_an_earlier_body(q: Tensor) -> Tensor:
    def body(q: Tensor, mask: Tensor) -> Tensor:
        mask[1, 3] = True
        return q.sin()

    mask = _causal()
    return _layer(checkpoint(body, q, mask, use_reentrant=False), mask)


def _edited_by_an_earlier_body_and_used_outside(q: Tensor) -> Tensor:
    def body(q: Tensor, mask: Tensor) -> Tensor:
        mask.logical_or_(torch.ones(S, dtype=torch.bool).diag())
        return q.sin()

    mask = _causal().mT.contiguous()
    return _attention(checkpoint(body, q, mask, use_reentrant=False), mask)


def _edited_through_what_a_body_gave_back(q: Tensor) -> Tensor:
    def body(q: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return q.sin(), mask[1:]

    mask = _causal()
    q, rows = checkpoint(body, q, mask, use_reentrant=False)
    rows[:, 3] = True
    return _layer(q, mask)


def _edited_in_a_body_in_a_body(q: Tensor) -> Tensor:
    def inner(q: Tensor, mask: Tensor) -> Tensor:
        mask[1, 3] = True
        return q.sin()

    def body(q: Tensor, mask: Tensor) -> Tensor:
        return checkpoint(inner, q, mask, use_reentrant=False) + _attention(q, mask)

    return checkpoint(body, q, _causal(), use_reentrant=False)


@pytest.mark.parametrize(
    "function",
    [
        _edited_inside_under_another_name,
        _edited_by_an_earlier_body,
        _edited_by_an_earlier_body_and_used_outside,
        _edited_through_what_a_body_gave_back,
        _edited_in_a_body_in_a_body,
    ],
    ids=lambda f: f.__name__,
)
def test_a_mask_that_something_wrote_to_stays_dense(function: Callable[[Tensor], Tensor]) -> None:
    for site in _forward(function).report.sites:
        assert not site.spec.mask.is_causal
        assert site.spec.mask.dense is not None
        assert site.spec.mask.read == ()
