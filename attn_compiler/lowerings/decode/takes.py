"""What the decode kernel takes, of what our kernels share."""

from __future__ import annotations

import dataclasses

from attn_compiler.lowerings.shared import kernel_limits

TAKES = dataclasses.replace(
    kernel_limits.TAKES, parts=kernel_limits.TAKES.parts - {"documents"}, gradients=False, dropout=False
)
