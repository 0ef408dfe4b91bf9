"""A lowering that breaks an invariant is caught before anything runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from attn_compiler.lowerings.base import Emitter, Operands
from attn_compiler.lowerings.sdpa.lowering import SdpaCpuFlash
from attn_compiler.reasons.errors import AttnCompilerWarning, VerifyFailed
from attn_compiler.spec.attention import AttentionSpec
from tests.passes.compiling import CPU_FLASH, compiled

Q = (2, 4, 6, 8)
Tensor = torch.Tensor
Emit = Callable[[Emitter, AttentionSpec, Operands], fx.Node]


def _layer(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q)


def _wrong_shape(emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
    return emitter.call(torch.narrow, operands.q, 3, 0, 4)


def _wrong_size(emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
    return emitter.call(torch.narrow, operands.q, 2, 0, 5)


def _wrong_device(emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
    return emitter.call(torch.Tensor.to, operands.q, "meta")


def _no_such_attribute(emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
    missing = operands.q.graph.create_node("get_attr", "nowhere")
    missing.meta["example_value"] = emitter.value(operands.q)
    return emitter.call(torch.add, operands.q, missing)


def _break(monkeypatch: pytest.MonkeyPatch, emit: Emit) -> None:
    monkeypatch.setattr(SdpaCpuFlash, "emit", lambda _, *args: emit(*args))


@pytest.mark.parametrize(
    ("emit", "observed"),
    [
        (_wrong_shape, r"\(2, 4, 6, 4\)"),
        (_wrong_size, r"\(2, 4, 5, 8\)"),
        (_wrong_device, "on meta"),
        (_no_such_attribute, "nonexistent attribute nowhere"),
    ],
)
def test_strict_raises_with_what_should_hold(emit: Emit, observed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _break(monkeypatch, emit)
    with pytest.raises(VerifyFailed, match=observed) as caught:
        compiled(_layer)(torch.randn(Q))
    assert caught.value.pass_name == "lower"


def test_without_strict_the_model_runs_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    _break(monkeypatch, _wrong_shape)
    run = compiled(_layer, strict=False)
    q = torch.randn(Q)
    with pytest.warns(AttnCompilerWarning, match="it no longer holds that the output is"):
        torch.testing.assert_close(run(q), _layer(q))
    assert run.report.failure is not None
    assert CPU_FLASH not in run.calls


def test_wrong_dtype_is_brought_back_to_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel answers in q's dtype whatever the model goes on with: a cast, no failure."""
    _break(monkeypatch, lambda emitter, spec, operands: emitter.call(torch.Tensor.to, operands.q, torch.float64))
    got = compiled(_layer)(torch.randn(Q))
    assert got.dtype == torch.float32


def test_wrong_output_node_dtype_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the passes themselves put into place is checked too."""
    from attn_compiler.passes.graph import strides

    def restride(*args: Any) -> fx.Node:
        builder, node, _ = args
        return builder.call(torch.Tensor.to, node, torch.float16)

    monkeypatch.setattr(strides, "relies_on", lambda *args: "somebody")
    monkeypatch.setattr(strides, "restride", restride)
    with pytest.raises(VerifyFailed, match=r"torch.float16"):
        compiled(_layer)(torch.randn(Q))


def test_switched_off_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    _break(monkeypatch, _wrong_size)
    run = compiled(_layer, check_invariants=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AttnCompilerWarning)
        assert run(torch.randn(Q)).shape == (2, 4, 5, 8)


def test_a_right_graph_passes() -> None:
    run = compiled(_layer)
    run(torch.randn(Q))
    assert run.report.failure is None
