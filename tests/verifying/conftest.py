"""What tests of training share: nothing is left of checks before, and kernels whose backward is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attn_compiler.lowerings.sdpa.lowering import SdpaCpuFlash
from attn_compiler.reporting import verifications as results

Tensor = torch.Tensor


@pytest.fixture
def nothing_kept() -> Iterator[None]:
    results.forget()
    yield
    torch._dynamo.reset()


def scaled_gradient(x: Tensor, factor: float) -> Tensor:
    """x, whose gradient is off by a factor."""
    return x.detach() + (x - x.detach()) * factor


@pytest.fixture(params=["q", "k", "v"])
def wrong_backward(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    emit = SdpaCpuFlash.emit
    name: str = request.param

    def wrong(self: Any, emitter: Any, spec: Any, operands: Any) -> Any:
        # bfloat16 has steps of 0.8%, and the rule allows for twice what the model's own is off by.
        factor = 1.1 if spec.dtype == "bfloat16" else 1.05
        scaled = emitter.call(scaled_gradient, getattr(operands, name), factor)
        return emit(self, emitter, spec, type(operands)(**{**vars_of(operands), name: scaled}))

    monkeypatch.setattr(SdpaCpuFlash, "emit", wrong)
    return name


def vars_of(x: Any) -> dict[str, Any]:
    return {field: getattr(x, field) for field in x.__dataclass_fields__}
