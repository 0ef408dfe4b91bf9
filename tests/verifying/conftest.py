"""Nothing is left of checks before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attn_compiler.reporting import verifications as results


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    results.forget()
    yield
    torch._dynamo.reset()
