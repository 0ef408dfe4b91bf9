"""Proofs: made once for a text and its sizes, kept on disk, and not made where the text already speaks against a function."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.graph_ops.linear_recurrence import definition
from attn_compiler.passes.matching.linear import draws, proving, running, same_steps, substitutes
from attn_compiler.passes.matching.linear.running import Proposed
from attn_compiler.passes.matching.linear.source import Source
from attn_compiler.reasons.codes import Code
from attn_compiler.spec.linear import LinearForm, LinearSpec
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


_NUMBERS = {"chunk_size": 16, "use_qk_l2norm_in_kernel": True, "dt_softplus": True, "dt_limit": (0.0, 9.0)}


def _form(name: str, roles: tuple[str, ...]) -> tuple[Proposed, LinearForm]:
    proposed = substitutes.proposal(linear_variants.own(name))
    assert proposed is not None
    return proposed, running.form_of(proposed, roles, _NUMBERS, channel=False)


def test_a_function_is_given_its_operands_its_numbers_and_its_flags() -> None:
    proposed, form = _form("torch_chunk_gated_delta_rule", ("q", "k", "v", "g", "beta"))
    assert (form.chunk, form.eps, form.limits) == (16, running.EPS, None)
    spec = linear_forms.spec(form)
    given = [x.detach().float() for x in draws.operands(spec, next(iter(draws.sizes(spec))))]
    torch.testing.assert_close(proposed.run(form, given), definition(form, given), rtol=1e-4, atol=1e-5)


def test_a_function_of_one_token_writes_to_a_copy_of_the_state() -> None:
    proposed, form = _form("mamba2_selective_state_update", ("x", "dt", "A", "B", "C", "D", "dt_bias", "state"))
    spec = linear_forms.spec(form, length=1)
    (at, *_) = draws.sizes(spec)
    given = [x.detach().float() for x in draws.operands(spec, at)]
    before = given[-1].clone()
    torch.testing.assert_close(proposed.run(form, given), definition(form, given), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(given[-1], before)


def test_dtypes_are_those_that_the_function_gives() -> None:
    proposed, form = _form("torch_chunk_gated_delta_rule", ("q", "k", "v", "g", "beta"))
    half = dict.fromkeys(form.roles, torch.bfloat16)
    assert running.dtypes_of(proposed, form, half, grouped=True) == ("bfloat16", "float32")
    proposed, form = _form("mamba2_chunk_scan", ("x", "dt", "A", "B", "C"))
    assert running.dtypes_of(proposed, form, dict.fromkeys(form.roles, torch.bfloat16), grouped=False) == (
        "float32",
        "float32",
    )


def test_what_a_function_raises_is_told() -> None:
    proposed, form = _form("torch_chunk_gated_delta_rule", ("q", "k", "v", "g", "beta"))

    def raises(**_: object) -> None:
        raise RuntimeError("no such kernel")

    broken = dataclasses.replace(proposed, own=raises)
    assert "no such kernel" in running.dtypes_of(broken, form, dict.fromkeys(form.roles, torch.float32), grouped=False)


class _Runs(Proposed):
    """Runs another function in the place of the model's own."""

    function: Callable[[Tensor, Tensor], Tensor]

    def run(self, form: LinearForm, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return self.function(operands[0], operands[2]), operands[0]


def _why(function: Callable[[Tensor, Tensor], Tensor], **sizes: int | str) -> str | None:
    own = substitutes.proposal(linear_variants.own("torch_recurrent_gated_delta_rule"))
    assert own is not None
    proposed = _Runs(**{field.name: getattr(own, field.name) for field in dataclasses.fields(own)})
    object.__setattr__(proposed, "function", function)
    form = dataclasses.replace(linear_forms.DELTA, chunk=1)
    spec = dataclasses.replace(linear_forms.spec(form), num_heads_k=8, num_heads_v=16, head_dim_k=64, head_dim_v=128)
    return same_steps.why_not(proposed, dataclasses.replace(spec, **{"batch": 64, "length": 24, **sizes}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "function",
    [
        lambda q, v: q * q.shape[-1] ** -0.5,
        lambda q, v: q.repeat_interleave(v.shape[2] // q.shape[2], 2) * v.shape[-1] ** -0.5,
        lambda q, v: torch.stack([q[:, i] * 2.0 for i in range(q.shape[1])], 1),
        lambda q, v: q + torch.zeros(q.shape) + torch.arange(q.shape[0] * q.shape[1])[0],
    ],
)
@pytest.mark.parametrize("batch", [4096, "s0"])
def test_heads_dims_and_lengths_may_be_used(function: Callable[[Tensor, Tensor], Tensor], batch: int | str) -> None:
    assert _why(function, batch=batch) is None


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda q, v: q * (1 + q.shape[0] // 2048), "computes with ('mul', 3.0)"),
        (lambda q, v: q * 2.0 ** (q.shape[0] * q.shape[1] // 65536), "computes with ('mul', 2.0)"),
        (lambda q, v: q.tril(-(q.shape[0] // 2048)), "computes with ('tril', -2.0)"),
        (lambda q, v: q if q.shape[0] < 64 else q.clone(), "takes other steps"),
        (lambda q, v: sum([q.exp() for _ in range(q.shape[0] * v.shape[2] // 512)], q), "takes other steps"),
    ],
)
@pytest.mark.parametrize("batch", [4096, "s0"])
def test_numbers_and_loops_of_other_sizes_are_found(
    function: Callable[[Tensor, Tensor], Tensor], why: str, batch: int | str
) -> None:
    assert why in str(_why(function, batch=batch))
