"""What tracing learns from Dynamo's example values."""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensorMode

from attn_compiler.torch_private import tracing as torch_tracing


def test_fake_mode_of_the_values() -> None:
    with FakeTensorMode() as mode:
        fake = torch.empty(2)
    assert torch_tracing.fake_mode_of_values([3, fake]) is mode
    assert torch_tracing.fake_mode_of_values([]) is None
