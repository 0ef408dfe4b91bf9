"""What is known of kernels that failed, and who is told."""

from __future__ import annotations

import warnings

import pytest
import torch

from attn_compiler.lowerings.shared.calls import failures
from attn_compiler.lowerings.shared.calls.failures import Caller, Failures
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.errors import AttnCompilerWarning, KernelFailed
from tests.lowerings.specs import CAUSAL, make_spec

SPEC, OTHER = make_spec(), make_spec(mask=CAUSAL)


def test_a_failure_speaks_against_the_lowering_for_the_sites_of_its_text_alone() -> None:
    known = Failures()
    caller = Caller(lowering="triton", spec=SPEC)
    known.watch(["a text", "a helper"], caller)
    known.watch(["another text"], Caller(lowering="triton", spec=OTHER))
    assert known.fail("a text", "RuntimeError: no") == [caller]
    (reason,) = known.reasons("triton", SPEC)
    assert reason.code is Code.NOT_COMPILED
    assert reason.observed == "RuntimeError: no"
    assert reason.remedy is not None
    assert known.reasons("triton", OTHER) == known.reasons("hopper", SPEC) == []
    known.forget()
    assert known.reasons("triton", SPEC) == []
    assert known.fail("a text", "again") == []


def test_equal_callers_are_told_once() -> None:
    known = Failures()
    for _ in range(2):
        known.watch(["a text"], Caller(lowering="triton", spec=SPEC))
    assert len(known.fail("a text", "no")) == 1


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Failures:
    made = Failures()
    monkeypatch.setattr(failures, "FAILURES", made)
    return made


def test_code_that_launched_it_starts_over(here: Failures) -> None:
    started: list[str] = []
    here.watch(["a text"], Caller(lowering="triton", spec=SPEC, start_over=lambda: started.append("over")))
    with pytest.warns(AttnCompilerWarning, match="'triton' did not start: RuntimeError: no"):
        failures.at_launch("triton", "a text", RuntimeError("no"), 0.1)
    assert started == ["over"]


def test_strict_code_raises_and_what_raised_is_its_cause(here: Failures) -> None:
    here.watch(["a text"], Caller(lowering="triton", spec=SPEC, strict=True))
    error = RuntimeError("no")
    with pytest.raises(KernelFailed) as raised:
        failures.at_launch("triton", "a text", error, 0.1)
    assert raised.value.__cause__ is error


def test_what_does_not_compile_and_concerns_nobody_is_no_warning(here: Failures) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not failures.at_compilation("triton", "a text", RuntimeError("no"))
        assert not failures.at_compilation("tile_lists", "", RuntimeError("no"))


def test_memory_that_ran_out_is_not_made_good_another_way() -> None:
    assert not failures.is_ours(torch.OutOfMemoryError("no"))
    assert failures.is_ours(RuntimeError("no"))
