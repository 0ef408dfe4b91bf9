from __future__ import annotations

import logging

import pytest
import torch
from torch import fx

from attn_compiler.compiling.inner import Inner
from attn_compiler.options.options import Options


def test_other_compilers_get_none_of_inductors_options(caplog: pytest.LogCaptureFixture) -> None:
    """What has no effect is told of."""
    inner = Inner(options=Options(inner="eager"), patches={"max_autotune": True}, region=None, ahead=None)
    gm = fx.symbolic_trace(lambda x: x.sin())
    with caplog.at_level(logging.WARNING, logger="attn_compiler.compiling.inner"):
        function = inner.compile_rewritten(gm, [torch.ones(3)], "key")
    torch.testing.assert_close(function(torch.ones(3)), torch.ones(3).sin())
    assert "max_autotune" in caplog.text
