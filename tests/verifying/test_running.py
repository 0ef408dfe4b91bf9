from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from attn_compiler.passes.recovering import reading
from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.verifying import masks, running, whole
from attn_compiler.verifying.values import NoValueError
from tests.verifying.planning import LENGTH, SHAPE, Tensor, causal, planned, qkv

aten = torch.ops.aten


def test_results_come_in_the_order_of_the_plan() -> None:
    found = planned(lambda q, k, v: causal(q.sin(), k, v) @ causal(q, k, v).mT, *qkv())
    results = running.run_checks(found.plan, found.args).found
    assert [result.subject for result in results] == ["mask", "output"] * 2
    assert [result.skipped for result in results] == [None] * 4
    assert [result.formula for result in results] == ["k <= q", None] * 2
    assert {result.elements for result in results} == {LENGTH * LENGTH, torch.Size(SHAPE).numel()}
    for result in results[1::2]:
        assert result.error is not None
        assert result.allowed is not None
        assert 0 < result.error <= result.allowed < 1e-4


def test_what_turns_out_to_have_no_value_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> int:
        raise NoValueError("odd")

    monkeypatch.setattr(masks, "check_mask", none)
    found = planned(causal, *qkv())
    mask, output = running.run_checks(found.plan, found.args).found
    assert mask.skipped == "odd"
    assert output.skipped is None


def test_the_graph_runs_to_its_end_before_a_mismatch_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions that the graph enters, such as autocast, are left again."""
    monkeypatch.setitem(reading.READERS, aten.le.Tensor, reading.READERS[aten.lt.Tensor])

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return causal(q, k, v) @ v.mT

    found = planned(function, *qkv())
    with pytest.raises(VerificationMismatch):
        running.run_checks(found.plan, found.args)
    assert not torch.is_autocast_enabled("cpu")


def test_a_body_that_is_not_run_is_said_to_be_unchecked() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, flag: Tensor) -> Tensor:
        return torch.cond(flag.any(), causal, lambda q, k, v: q + 1, (q, k, v))

    found = planned(function, *qkv(), torch.tensor([False]))
    assert [v.skipped for v in running.run_checks(found.plan, found.args).found] == [
        "the first call did not run the graph that it is in"
    ] * len(found.plan.checks)
    found = planned(function, *qkv(), torch.tensor([True]))
    assert [v.skipped for v in running.run_checks(found.plan, found.args).found] == [None, None]


@pytest.mark.parametrize("flag", [True, False])
def test_nothing_is_held_afterwards(monkeypatch: pytest.MonkeyPatch, flag: bool) -> None:
    copies: list[weakref.ref[Tensor]] = []
    real = whole.isolated

    def isolated(args: Sequence[Any], shared: Sequence[bool]) -> list[Any]:
        found = real(args, shared)
        copies.extend(weakref.ref(x) for x in found)
        return found

    def function(q: Tensor, k: Tensor, v: Tensor, flag: Tensor) -> Tensor:
        return torch.cond(flag.any(), causal, lambda q, k, v: q + 1, (q, k, v))

    monkeypatch.setattr(whole, "isolated", isolated)
    found = planned(function, *qkv(), torch.tensor([flag]))
    gc.collect()
    gc.disable()
    try:
        running.run_checks(found.plan, found.args)
        assert len(copies) >= len(found.args)
        assert [ref() for ref in copies] == [None] * len(copies)
    finally:
        gc.enable()


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal(q * self.weight, k, v)


def test_trained_parameters_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[bool]] = []
    real = whole.isolated
    monkeypatch.setattr(whole, "isolated", lambda args, shared: seen.append(shared) or real(args, shared))
    found = planned(_Scaled(), *qkv())
    running.run_checks(found.plan, found.args)
    assert seen[0] == [isinstance(x, nn.Parameter) for x in found.args]
    assert any(seen[0])


def test_values_are_those_of_their_time() -> None:
    """A check that has to wait for the second write still gets what the tensors held before each of them."""

    def function(q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
        mask = torch.arange(LENGTH) < length
        length.add_(2)
        mask = (mask & (torch.arange(LENGTH) < length)).expand(LENGTH, LENGTH).clone()
        length.zero_()
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        mask.zero_()
        return out

    found = planned(function, *qkv(), torch.tensor(3))
    (loaded,) = (key for key in found.plan.checks[0].needs if "length" in key.name)
    assert loaded.copied
    results = running.run_checks(found.plan, found.args).found
    assert [result.skipped for result in results] == [None, None]
    assert results[0].formula == "k + 1 <= length"


def test_a_value_is_recorded_after_what_writes_it() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, length: Tensor, other: Tensor) -> Tensor:
        length.remainder_(other)
        mask = (torch.arange(LENGTH) < length)[None, :]
        length.zero_()
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    found = planned(function, *qkv(), torch.tensor(7), torch.tensor(4))
    (loaded,) = (key for key in found.plan.checks[0].needs if "length" in key.name)
    assert "remainder" in str(loaded.after)
    assert loaded.copied
    assert [result.skipped for result in running.run_checks(found.plan, found.args).found] == [None, None]
