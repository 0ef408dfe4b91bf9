"""The name of what a node calls, however it is called."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from attn_compiler.passes.calls import target_name


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (torch.ops.aten.linear.default, "linear"),
        (F.linear, "linear"),
        ("softmax", "softmax"),
        (torch.ops.aten.add_.Tensor, "add_"),
    ],
)
def test_target_name(target: object, name: str) -> None:
    graph = fx.Graph()
    node = graph.call_method(target) if isinstance(target, str) else graph.call_function(target)
    assert target_name(node) == name
