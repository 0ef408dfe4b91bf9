"""FlexAttention in eager mode on a CPU, for tests that ask for it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from torch.nn.attention import flex_attention


@pytest.fixture
def unfused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Eager FlexAttention says that it is slow, and refuses what needs gradients on CPUs. With kernels of another kind it is trained."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without")
        yield
