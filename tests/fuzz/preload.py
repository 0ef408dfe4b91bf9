"""What every process needs before its first program. The server that processes are forked from imports `warmed`, once for all of them."""

from __future__ import annotations

import torch
import torch.utils.checkpoint

from tests.fuzz import batch  # noqa: F401


def may_train() -> bool:
    """Whether a process may run a backward before it is forked.

    Not in a build with CUDA: there a backward starts a thread for each sort of device, also where the device is hidden, and a forked
    process has no such thread.
    """
    return not torch.backends.cuda.is_built()


def warm() -> None:
    """What torch imports at its first compilation, so that no fork has to."""
    torch.set_num_threads(1)
    trains = may_train()
    compiled = torch.compile(lambda x: x.softmax(-1) @ x, backend="aot_eager", fullgraph=True)
    result = compiled(torch.ones(2, 2, requires_grad=trains))
    if trains:
        result.sum().backward()
    torch._dynamo.reset()
