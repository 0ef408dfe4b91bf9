"""A mask that stays a tensor always says why: what was read to the end and may mask, or may not, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.reporting import wording
from attn_compiler.spec.masks import MaskSpec
from tests.passes.compiling import compiled

B, S, D = 2, 6, 8
LOWEST = torch.finfo(torch.float32).min
KEPT = torch.tensor([[1] * S, [1] * (S - 2) + [0] * 2])
Make = Callable[[Tensor], Tensor]


def mask_of(make: Make, kept: Tensor, *, called: bool, grad: bool = True) -> tuple[MaskSpec, str]:
    """In training, where rows without keys have gradients."""

    def function(q: Tensor, k: Tensor, kept: Tensor) -> Tensor:
        added = make(kept[:, None, None, :])
        if called:
            return F.scaled_dot_product_attention(q, k, k, attn_mask=added.expand(B, 1, S, S).contiguous())
        return F.softmax(q @ k.mT + added, -1) @ k

    q, k = (torch.randn(B, 1, S, D, requires_grad=grad) for _ in range(2))
    run = compiled(function, lowerings=["sdpa_cpu_flash", "math"])
    torch.testing.assert_close(run(q, k, kept), function(q, k, kept))
    return run.site.spec.mask, run.report.details()


#: numbers of an integer mask, in the ways of BERT and its relatives
OF_INTEGERS: dict[str, Make] = {
    "BERT": lambda m: (1.0 - m) * LOWEST,
    "BERT in integers": lambda m: (1 - m) * LOWEST,
    "BERT, cast": lambda m: (1.0 - m.float()) * LOWEST,
    "BERT in half": lambda m: ((1.0 - m.bfloat16()) * torch.finfo(torch.bfloat16).min).float(),
    "-1e9": lambda m: (1 - m) * -1e9,
    "less one": lambda m: (m.float() - 1) * 1e9,
    "taken off": lambda m: -1e9 * (1 - m),
    "its logarithm": lambda m: m.float().log(),
    "clamped": lambda m: (1 - m).clamp(0, 1) * LOWEST,
    "squared": lambda m: (1 - m * m) * LOWEST,
    "of both": lambda m: (1 - m * m.mT) * LOWEST,
    "a minimum": lambda m: torch.minimum(torch.zeros(()), (m - 1).float() * 1e30),
}


@pytest.mark.in_turns
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("name", OF_INTEGERS)
def test_whole_numbers_may_be_others_than_0_and_1(name: str, called: bool) -> None:
    mask, report = mask_of(OF_INTEGERS[name], KEPT, called=called)
    why = wording.unproved(mask)
    assert mask.dense is not None
    assert not mask.kinds
    assert why is not None
    assert "kept" in why
    assert "unproved  " in report


@pytest.mark.parametrize("name", ["BERT", "BERT in integers", "BERT, cast", "-1e9", "taken off"])
def test_without_gradients_they_are_proved(name: str) -> None:
    mask, report = mask_of(OF_INTEGERS[name], KEPT, called=False, grad=False)
    assert wording.unproved(mask) is None
    assert "highest number masks the others (proved)" in " ".join(report.split())


@pytest.mark.parametrize("name", ["BERT", "BERT in integers", "-1e9", "less one", "taken off"])
def test_the_reason_says_what_would_prove_it_and_it_does(name: str) -> None:
    why = wording.unproved(mask_of(OF_INTEGERS[name], KEPT, called=False)[0])
    assert why is not None
    assert "kept.bool()" in why
    mask, report = mask_of(lambda m: OF_INTEGERS[name](m.bool().float()), KEPT, called=False)
    assert mask.kinds
    assert wording.unproved(mask) is None
    assert "unproved  " not in report


@pytest.mark.parametrize(
    "make",
    [
        lambda m: (1 - m.bool().float()) * -1e4,
        lambda m: torch.where(m.bool(), 0.0, -1e4),
        lambda m: torch.triu(torch.full((S, S), -1e4), 1)[None, None],
        lambda m: torch.where(m.mT == m, 0.0, -100.0),
    ],
)
def test_numbers_that_are_too_near_to_zero(make: Make) -> None:
    why = wording.unproved(mask_of(make, KEPT, called=False)[0])
    assert why is not None
    assert "too near to zero" in why


def test_numbers_that_are_chosen_at_run_time_and_not_read_as_a_mask() -> None:
    mask, _ = mask_of(lambda m: OF_INTEGERS["clamped"](m.bool().float()), KEPT, called=False)
    assert not mask.kinds
    assert "is not read as numbers that mask" in str(wording.unproved(mask))


def test_numbers_by_an_index_of_run_time() -> None:
    why = wording.unproved(mask_of(lambda m: torch.tensor([LOWEST, 0.0])[m], KEPT, called=False)[0])
    assert why is not None
    assert "run time only" in why


@pytest.mark.parametrize("make", [lambda m: m.float(), lambda m: m * LOWEST, lambda m: 1e4 * m.float() - 1e4])
def test_an_input_that_is_added_as_it_is(make: Make) -> None:
    why = wording.unproved(mask_of(make, KEPT, called=False)[0])
    assert why is not None
    assert "it may mask too" in why


@pytest.mark.parametrize("make", [lambda m: (1 - m.float()) * -1e4, lambda m: ((1 - m) * -10000).float()])
def test_whole_numbers_that_are_added_have_a_remedy_that_helps(make: Make) -> None:
    """diffusers' masks, and BERT's of old."""
    why = wording.unproved(mask_of(make, KEPT, called=True)[0])
    assert why is not None
    assert "whole numbers" in why
    assert "mask.bool()" in why
    mask, _ = mask_of(lambda m: (1 - m.bool().float()) * -65504.0, KEPT, called=True)
    assert mask.kinds


@pytest.mark.parametrize("called", [False, True])
def test_a_mask_that_was_read_in_part(called: bool) -> None:
    """What was read stands beside the reason."""
    unread = torch.rand(S, S) > 0.5
    mask, report = mask_of(
        lambda m: torch.where((m.bool() & unread) & (torch.ones(S, S).tril() > 0), 0.0, LOWEST), KEPT, called=called
    )
    assert [type(kind).__name__ for kind in mask.kinds] == ["Causal", "KeyPadding"]
    assert "holds an element for each query and key" in str(wording.unproved(mask))
    assert "unproved  " in report
    assert "(proved)" in report


def test_truth_values_that_come_in() -> None:
    mask, _ = mask_of(lambda m: m, torch.rand(B, S) > 0.5, called=True)
    assert mask.kinds
    square, _ = mask_of(lambda m: m.new_ones(1, 1, 1, 1) & m, torch.rand(B, S) > 0.5, called=True)
    assert square.kinds


def test_what_is_known_to_be_no_mask_has_no_such_row() -> None:
    """ALiBi: nothing of it can shut a key out."""

    def alibi(m: Tensor) -> Tensor:
        at = torch.arange(S)
        return -(at[:, None] - at).abs()[None, None] * torch.tensor([0.5, 0.25]).view(1, 2, 1, 1)

    q = torch.randn(B, 2, S, D)
    run = compiled(lambda q: F.softmax(q @ q.mT + alibi(q), -1) @ q)
    run(q)
    assert run.site.spec.score.proved
    assert wording.unproved(run.site.spec.mask) is None
