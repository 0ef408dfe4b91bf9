"""What the kernels for Hopper are run on: the Triton family's problems, with lists for blocks of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from attn_compiler.lowerings.hopper import launch
from attn_compiler.lowerings.hopper.kernels import forward_sm90
from attn_compiler.lowerings.hopper.plan import blocks_of
from attn_compiler.lowerings.shared import launching, persistent
from attn_compiler.lowerings.shared.kernel_plan import Call
from attn_compiler.lowerings.shared.launching import Arguments
from attn_compiler.lowerings.triton.kernels.forward import attention_again
from tests.lowerings import kernel_problems
from tests.lowerings.kernel_cases import Case
from tests.lowerings.kernel_problems import Problem, planned
from tests.lowerings.shared.kernels import gluon_in_torch


def build(case: Case, **given: Any) -> Problem:
    """As `kernel_problems.build`, whose lists of tiles are made for the kernel's blocks."""
    problem = kernel_problems.build(case, **given)
    if not problem.plan.tiles:
        return problem
    call = Call.from_text(problem.text)
    tiles = dataclasses.replace(call.tiles, forward=blocks_of(call.spec).tile)
    lists = kernel_problems.lists(case, problem.named, tiles, str(problem.q.device))
    return dataclasses.replace(problem, named=problem.named | {"tiles": lists["tiles"]})


def operands(problem: Problem) -> list[Tensor]:
    """Those of the leaf op."""
    return [problem.named[name] for name in problem.plan.operands if name != "tiles_by_key"]


def launched(problem: Problem, *, programs: int) -> tuple[dict[str, Arguments], dict[str, Tensor]]:
    """The arguments of each kernel of a forward, none of which runs, and the tensors."""
    found: dict[str, Arguments] = {}
    seen: dict[str, Tensor] = {}

    def record(kernel: Any, same: Any, tensors: Any, arguments: Callable[[], Arguments], part: str = "") -> None:
        found[kernel.fn.__name__] = arguments()
        seen.update(tensors)

    grid = mock.patch.object(persistent, "programs", lambda blocks, device: (min(blocks, programs), 1, 1))
    with planned(problem.plan), mock.patch.object(launch, "launch", record), grid, torch.no_grad():
        launch.forward(problem.q, problem.k, problem.v, operands(problem), problem.text)
    return found, seen


def in_torch(problem: Problem, *, programs: int = 3) -> tuple[Tensor, Tensor]:
    """out and lse as the kernel leaves them, run by `gluon_in_torch`: rows to be computed again have an lse of NaN."""
    found, tensors = launched(problem, programs=programs)
    arguments = found["attention_forward_sm90"]
    tensors["Lse"].fill_(12345.0)
    tensors["Out"].fill_(torch.nan)
    kernel = forward_sm90.attention_forward_sm90
    given: dict[str, Any] = {
        name: None if source is None else _flat(tensors[source]) for name, source in arguments.tensors.items()
    }
    given |= launching.as_taken(kernel.arg_names, arguments.numbers)
    gluon_in_torch.run(forward_sm90, "attention_forward_sm90", arguments.grid, given)
    return tensors["Out"], tensors["Lse"]


def outputs(problem: Problem, *, programs: int = 3) -> tuple[Tensor, Tensor]:
    """out and lse as the leaf op leaves them. The second kernel is Triton's, which its interpreter runs."""
    found, tensors = launched(problem, programs=programs)
    out, lse = in_torch(problem, programs=programs)
    again = found.get("attention_again")
    if again is not None:
        same = launching.Alike(device=out.device)
        launching.launch(attention_again, same, {**tensors, "Out": out, "Lse": lse}, lambda: again)
    return out, lse


def _flat(x: Tensor) -> Tensor:
    """What lies in memory from its first element on."""
    bytes_of = x.view(torch.uint8) if x.dtype == torch.bool else x
    left = bytes_of.untyped_storage().nbytes() // bytes_of.element_size() - bytes_of.storage_offset()
    return bytes_of.detach().as_strided((left,), (1,))
