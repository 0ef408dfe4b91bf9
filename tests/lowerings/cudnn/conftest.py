"""A frontend that records, for tests that ask for one."""

from __future__ import annotations

import pytest
import torch

from attn_compiler.lowerings.cudnn import frontend as cudnn_frontend, graphs, plans
from attn_compiler.spec.target import Target
from tests.lowerings.cudnn.recording_frontend import Frontend


@pytest.fixture
def frontend(monkeypatch: pytest.MonkeyPatch) -> Frontend:
    """As if a machine with this frontend were this one."""
    recording, here = Frontend(), Target.fake(cudnn_frontend="1.22.1")
    built = graphs.Plans(lambda key: graphs.build(recording, key, lambda: 0.0))
    monkeypatch.setattr(cudnn_frontend, "PLANS", built)
    monkeypatch.setattr(plans, "_is_here", lambda target: target == here)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return recording
