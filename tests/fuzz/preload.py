"""What every process needs before its first program. The server that processes are forked from imports `warmed`, once for all of them."""

from __future__ import annotations

import torch
import torch.utils.checkpoint

from tests.fuzz import batch  # noqa: F401


def warm() -> None:
    """What torch imports at its first compilation, so that no fork has to."""
    torch.set_num_threads(1)
    result = torch.compile(lambda x: x.softmax(-1) @ x, backend="aot_eager", fullgraph=True)(
        torch.ones(2, 2, requires_grad=True)
    )
    if not torch.backends.cuda.is_built():
        # A backward starts a thread for each sort of device, also where a device is hidden. A process that is forked has no such thread.
        result.sum().backward()
    torch._dynamo.reset()
