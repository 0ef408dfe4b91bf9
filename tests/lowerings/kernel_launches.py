"""What the Triton kernels would be launched with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from attn_compiler.lowerings.shared.launching.launch import Arguments
from attn_compiler.lowerings.triton import launch
from tests.lowerings.kernel_problems import Problem, planned

#: no multiple of any block
SIZES = {"batch": 3, "heads_q": 8, "heads_kv": 2, "seqlen_q": 157, "seqlen_kv": 513}


def launched(problem: Problem) -> dict[str, Arguments]:
    """The arguments of each kernel of a forward and a backward, none of which runs."""
    found: dict[str, Arguments] = {}

    def record(kernel: Any, same: Any, tensors: Any, arguments: Callable[[], Arguments], part: str = "") -> None:
        found[kernel.fn.__name__] = arguments()

    with planned(problem.plan), mock.patch.object(launch, "launch", record), torch.no_grad():
        given = (problem.q, problem.k, problem.v, problem.operands)
        out, lse = launch.forward(*given, problem.text)
        launch.gradients(out, lse, *given, out, lse, problem.text)
    return found
