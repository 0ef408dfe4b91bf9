"""What every process needs before its first program. The server that processes are forked from imports `warmed`, once for all of them."""

from __future__ import annotations

import torch
import torch.utils.checkpoint

from tests.fuzz import batch  # noqa: F401


def warm() -> None:
    """What torch imports at its first compilation, so that no fork has to.

    With gradients only in a build without CUDA: to trace a backward starts a thread for each sort of device, also where the device is
    hidden, and a forked process has no such thread.
    """
    torch.set_num_threads(1)
    trains = not torch.backends.cuda.is_built()
    compiled = torch.compile(lambda x: x.softmax(-1) @ x, backend="aot_eager", fullgraph=True)
    result = compiled(torch.ones(2, 2, requires_grad=trains))
    if trains:
        result.sum().backward()
    torch._dynamo.reset()
