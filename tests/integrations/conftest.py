"""What tests of launchers share: nothing of an earlier test is compiled, and what is reported is this test's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import attn_compiler
from attn_compiler.compiling import backend


@pytest.fixture(autouse=True)
def _from_the_start() -> None:
    torch._dynamo.reset()
    attn_compiler.reset()


@pytest.fixture
def quick() -> Iterator[None]:
    """A recipe's own call of torch.compile, without Inductor, and with every fault of ours raised."""
    split = backend.split_options

    def quick_ones(mode: str | None, options: Any) -> Any:
        return split(mode, {"inner": "eager", "strict": True, **(options or {})})

    with mock.patch.object(backend, "split_options", quick_ones):
        yield
