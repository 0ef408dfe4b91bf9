"""Proofs: made once for a text and its sizes, kept on disk, and not made where the text already speaks against a function."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attn_compiler.passes.matching.linear import proving, running, substitutes
from attn_compiler.passes.matching.linear.running import Proposed
from attn_compiler.passes.matching.linear.source import Source
from attn_compiler.reasons.codes import Code
from attn_compiler.spec.linear import LinearSpec
from attn_compiler.torch_private.store import Store
from tests.lowerings.linear import linear_forms
from tests.near_miss import linear_variants


@pytest.fixture(autouse=True)
def _nothing_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "_PROVED", {})


def _call(name: str = "torch_recurrent_gated_delta_rule", **changed: Any) -> tuple[Proposed, LinearSpec]:
    proposed = substitutes.proposal(linear_variants.own(name))
    assert proposed is not None
    numbers = {"use_qk_l2norm_in_kernel": True}
    form = running.form_of(proposed, ("q", "k", "v", "g", "beta"), numbers, channel=False)
    return proposed, linear_forms.spec(form, **{"length": 3, **changed})


def _counted(proposed: Proposed) -> tuple[Proposed, list[int]]:
    calls: list[int] = []
    own: Callable[..., Any] = proposed.own

    def run(**given: Any) -> Any:
        calls.append(1)
        return own(**given)

    run.__name__ = own.__name__
    return dataclasses.replace(proposed, own=run), calls


def test_a_proof_is_made_once_and_kept_for_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proposed, calls = _counted(_call()[0])
    spec = _call()[1]
    store = Store(root=tmp_path)
    assert proving.why_not(proposed, spec, store) is None
    made = len(calls)
    assert made
    assert proving.why_not(proposed, spec, store) is None
    monkeypatch.setattr(proving, "_PROVED", {})
    assert proving.why_not(proposed, spec, store) is None
    assert len(calls) == made
    assert proving.why_not(proposed, dataclasses.replace(spec, head_dim_k=6), store) is None
    assert len(calls) > made


def test_a_failure_says_the_function_its_line_and_why() -> None:
    proposed, spec = _call()

    def other(**given: Any) -> Any:
        out, last = linear_variants.own("torch_recurrent_gated_delta_rule")(**given)
        return 2 * out, last

    other.__name__ = proposed.called
    reason = proving.why_not(dataclasses.replace(proposed, own=other), spec, None)
    assert reason is not None
    assert reason.code == Code.LINEAR_NOT_PROVED
    assert reason.observed.startswith("torch_recurrent_gated_delta_rule (modeling_qwen3_next.py:")
    assert "from the recurrence's at 1 tokens" in reason.observed


def test_what_a_function_raises_is_the_reason() -> None:
    proposed, spec = _call()

    def raises(**_: Any) -> Any:
        raise RuntimeError("out of luck")

    raises.__name__ = proposed.called
    reason = proving.why_not(dataclasses.replace(proposed, own=raises), spec, None)
    assert reason is not None
    assert "out of luck" in reason.observed


def test_where_the_text_speaks_against_it_nothing_is_run() -> None:
    proposed, calls = _counted(_call()[0])
    reason = proving.why_not(
        dataclasses.replace(proposed, text=Source(digest="", why_not="it branches on `x`")), _call()[1], None
    )
    assert reason is not None
    assert "branches" in reason.observed
    assert calls == []


def test_random_numbers_of_the_process_are_left_alone() -> None:
    import torch

    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    proving.why_not(*_call(), None)
    torch.testing.assert_close(torch.rand(3), wanted)


def test_not_a_number_is_far_from_everything() -> None:
    import torch

    odd = torch.tensor([1.0, float("nan")])
    assert not proving._distance([torch.ones(2), odd], [torch.ones(2), torch.ones(2)]) < 1.0


def test_a_text_that_was_read_is_proved_once_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    proposed, spec = _call()
    counted, calls = _counted(proposed)
    assert proving.why_not(counted, dataclasses.replace(spec, length=1 << 20), None) is None
    made = len(calls)
    assert proving.why_not(counted, dataclasses.replace(spec, length="s0"), None) is None
    assert len(calls) == made
    monkeypatch.setattr(proving, "READ", {})
    assert proving.why_not(counted, spec, None) is None
    assert len(calls) > made
    assert proving.why_not(counted, dataclasses.replace(spec, length="s0"), None) is not None


def test_a_run_that_would_take_minutes_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "READ", {})
    counted, calls = _counted(_call()[0])
    reason = proving.why_not(counted, dataclasses.replace(_call()[1], length=proving._LONGEST + 1), None)
    assert reason is not None
    assert "at most 8192 are run" in reason.observed
    assert calls == []


def test_each_text_that_was_read_is_a_digest_and_says_what_it_is() -> None:
    assert proving.READ
    for digest, words in proving.READ.items():
        assert re.fullmatch(r"[0-9a-f]{16}", digest)
        assert "transformers" in words
