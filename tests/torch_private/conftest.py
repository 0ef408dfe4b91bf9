"""Graphs as Dynamo gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

Capture = Callable[..., list[fx.GraphModule]]


def _capture(gm: fx.GraphModule, seen: list[fx.GraphModule]) -> Callable[..., Any]:
    seen.append(gm)
    return gm.forward


@pytest.fixture
def capture() -> Capture:
    """Dynamo's graphs of one call."""

    def run(function: Callable[..., Any], *args: Any, **compile_options: Any) -> list[fx.GraphModule]:
        seen: list[fx.GraphModule] = []
        torch.compile(function, backend=lambda gm, _: _capture(gm, seen), **compile_options)(*args)
        return seen

    return run
