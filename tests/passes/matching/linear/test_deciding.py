"""What is decided of a call, from its operands' shapes and dtypes, the options, and the proof."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.options.options import Options
from attn_compiler.passes.matching import linear_calls
from attn_compiler.passes.matching.linear import deciding, substitutes
from attn_compiler.passes.matching.linear.running import Proposed
from attn_compiler.passes.matching.linear.source import Source
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.reasons.errors import AttnCompilerWarning
from attn_compiler.spec.linear import LinearForm
from tests.near_miss import linear_variants

_NUMBERS = {"chunk_size": 64, "use_qk_l2norm_in_kernel": True}


def _proposed(name: str = "torch_chunk_gated_delta_rule") -> Proposed:
    proposed = substitutes.proposal(linear_variants.own(name))
    assert proposed is not None
    return proposed


def _operands(**changed: Tensor) -> dict[str, Tensor]:
    q = torch.zeros(2, 10, 2, 8)
    given = {"q": q, "k": q, "v": torch.zeros(2, 10, 4, 6), "g": torch.zeros(2, 10, 4), "beta": torch.zeros(2, 10, 4)}
    return given | changed


def _spec(operands: Mapping[str, Tensor], proposed: Proposed | None = None) -> Any:
    return deciding.spec_of(proposed or _proposed(), list(operands.values()), tuple(operands), _NUMBERS)


def test_a_spec_has_the_sizes_of_the_operands() -> None:
    spec = _spec(_operands())
    assert (spec.batch, spec.length, spec.num_heads_k, spec.num_heads_v) == (2, 10, 2, 4)
    assert (spec.head_dim_k, spec.head_dim_v, spec.device, spec.needs_grad) == (8, 6, "cpu", False)
    assert (spec.form.channel, spec.form.chunk, spec.form.state_dtype) == (False, 64, "float32")
    wide = _spec(_operands(g=torch.zeros(2, 10, 4, 8)), _proposed("chunk_kimi_delta_attention"))
    assert isinstance(wide, Reason) or wide.form.channel


def test_a_gradient_is_needed_where_an_operand_has_one() -> None:
    operands = _operands(v=torch.zeros(2, 10, 4, 6, requires_grad=True))
    assert _spec(operands).needs_grad
    with torch.no_grad():
        assert not _spec(operands).needs_grad


@pytest.mark.parametrize(
    ("changed", "code", "why"),
    [
        ({"g": torch.zeros(2, 4, 10)}, Code.LINEAR_NOT_PROVED, "g is"),
        ({"v": torch.zeros(2, 10, 4)}, Code.LINEAR_NOT_PROVED, "v has 3 axes"),
        ({"v": torch.zeros(2, 10, 3, 6)}, Code.LINEAR_NOT_PROVED, "g is"),
        ({"q": torch.zeros(2, 10, 2, 8, dtype=torch.int64)}, Code.DTYPE, "int64"),
        ({"g": torch.zeros(2, 10, 4, device="meta")}, Code.DTYPE, "meta"),
        ({"state": torch.zeros(2, 4, 6, 8)}, Code.LINEAR_NOT_PROVED, "state is"),
    ],
)
def test_operands_of_other_shapes_are_told(changed: dict[str, Tensor], code: Code, why: str) -> None:
    found = _spec(_operands(**changed))
    assert isinstance(found, Reason)
    assert found.code == code
    assert why in found.observed


def test_an_operand_that_is_missing_is_named() -> None:
    operands = _operands()
    del operands["beta"]
    assert "beta" in _spec(operands).observed


def _taken(options: Options, proposed: Proposed | None = None) -> LinearForm | Reason | None:
    operands = _operands()
    return deciding._taken(proposed or _proposed(), list(operands.values()), tuple(operands), _NUMBERS, options, {})


def test_what_the_user_names_decides() -> None:
    named = Options(lowering="linear_reference", cache_rewrites=False)
    assert isinstance(_taken(named), LinearForm)
    assert _taken(Options(lowering="untouched", cache_rewrites=False)) is None
    assert deciding._asked(Options(lowerings=("triton", "linear_reference"))) == ("linear_reference",)
    assert deciding._asked(Options(lowering="triton")) is None


def test_a_function_that_is_not_proved_is_not_taken() -> None:
    why = dataclasses.replace(_proposed(), text=Source(digest="", why_not="it branches on `x`"))
    found = _taken(Options(lowering="linear_reference", cache_rewrites=False), why)
    assert isinstance(found, Reason)
    assert found.code == Code.LINEAR_NOT_PROVED


def test_nothing_is_decided_outside_of_a_compilation_of_ours() -> None:
    operands = _operands()
    assert deciding.decide("f", _proposed, list(operands.values()), tuple(operands), _NUMBERS) is None
    assert linear_calls.refused() == {}


def test_what_fails_in_deciding_leaves_the_call_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(deciding, "_options", lambda: (Options(), {}))
    monkeypatch.setattr(deciding, "spec_of", fail)
    operands = _operands()
    with pytest.warns(AttnCompilerWarning, match="planted"):
        assert deciding.decide("f", _proposed, list(operands.values()), tuple(operands), _NUMBERS) is None
    assert {reason.code for reason in linear_calls.refused().values()} == {Code.FAULT}
