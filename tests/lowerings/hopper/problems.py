"""What the kernels for Hopper are run on: the Triton family's problems, with lists for blocks of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from attn_compiler.lowerings.choice import head_parts
from attn_compiler.lowerings.hopper import backward_launch, launch, plan
from attn_compiler.lowerings.hopper.kernels import backward_sm90, wide_backward_sm90, wide_values_sm90
from attn_compiler.lowerings.hopper.lowering import further_operands
from attn_compiler.lowerings.hopper.ops import grad_operands as grad_operand_names
from attn_compiler.lowerings.shared.calls.arguments import prepare
from attn_compiler.lowerings.shared.kernels.forward import attention_again
from attn_compiler.lowerings.shared.launching import launch as launching, persistent, replaying
from attn_compiler.lowerings.shared.launching.launch import Arguments
from attn_compiler.lowerings.shared.parts.kernel_plan import Call, head_dim_sums, head_dim_tiles
from attn_compiler.spec.attention import AttentionSpec
from tests.lowerings import kernel_problems
from tests.lowerings.kernel_cases import Case
from tests.lowerings.kernel_problems import Problem, planned
from tests.lowerings.shared.kernels import gluon_in_torch

_EMULATED = (
    backward_sm90.attention_backward_sm90,
    wide_backward_sm90.attention_grad_wide_sm90,
    wide_values_sm90.attention_grad_v_wide_sm90,
)
#: parameters of theirs
_WRITTEN = {"Grad", "GradK", "GradV"}


@contextlib.contextmanager
def summed() -> Iterator[None]:
    """Head dims that are no power of two have products of their own size, measured or not. Problems are to be built and run within."""

    def is_sum(spec: AttentionSpec) -> bool:
        return head_dim_sums(spec) != head_dim_tiles(spec)

    with mock.patch.object(head_parts, "is_faster", is_sum):
        yield


def build(case: Case, **given: Any) -> Problem:
    """As `kernel_problems.build`, whose lists of tiles are made for the kernel's blocks."""
    problem = kernel_problems.build(case, **given)
    if not problem.plan.tiles:
        return problem
    call = Call.from_text(problem.text)
    tiles = dataclasses.replace(call.tiles, forward=plan.blocks_of(call.spec).tile)
    if plan.has_wide_backward(call.spec):
        tiles = plan.wide_grad_tiles(tiles, call.spec)
    elif plan.has_backward(call.spec):
        tiles = dataclasses.replace(tiles, grad_kv=plan.grad_blocks_of(call.spec, problem.plan).tile)
    ordered = plan.is_ordered(call.spec)
    lists = kernel_problems.lists(case, problem.named, tiles, str(problem.q.device), ordered=ordered)
    return dataclasses.replace(problem, named=problem.named | lists)


def operands(problem: Problem) -> list[Tensor]:
    """Those of the leaf op."""
    found = [problem.named[name] for name in problem.plan.operands if name != "tiles_by_key"]
    lengths = problem.q.shape[2], problem.k.shape[2]
    emitter: Any = kernel_problems.Eager()
    named: Any = problem.named
    with torch.no_grad():
        further: list[Any] = further_operands(emitter, problem.plan, named, lengths, by_key=False)
    return [*found, *further]


def grad_operands(problem: Problem) -> list[Tensor]:
    """Those of its backward."""
    emitter: Any = kernel_problems.Eager()
    named: Any = problem.named
    lengths = problem.q.shape[2], problem.k.shape[2]
    with torch.no_grad():
        further: list[Any] = further_operands(emitter, problem.plan, named, lengths, by_key=True)
    with planned(problem.plan):
        names = grad_operand_names(Call.from_text(problem.text).spec)
    return [*(problem.named[name] for name in names if name in problem.plan.operands), *further]


def launched(
    problem: Problem, *, programs: int, in_order: bool = False
) -> tuple[dict[str, Arguments], dict[str, Tensor]]:
    """The arguments of each kernel of a forward, with gradients of a backward instead, none of which runs, and the tensors. A kernel that
    is launched for more than one gradient has these behind its name."""
    found: dict[str, Arguments] = {}
    seen: dict[str, Tensor] = {}

    def record(kernel: Any, same: Any, tensors: Any, arguments: Callable[[], Arguments], part: str = "") -> None:
        found[f"{kernel.fn.__name__} {part}".strip()] = arguments()
        seen.update(tensors)

    with starting(problem, record, programs=programs):
        given = (problem.q, problem.k, problem.v)
        out, lse = launch.forward(*given, operands(problem), problem.text)
        if problem.case.needs_grad:
            found.clear()
            backward_of(in_order=in_order)(out, lse, *given, grad_operands(problem), out, lse, problem.text)
    return found, seen


def backward_of(*, in_order: bool) -> Callable[..., Any]:
    """The one that adds up in one order, or the one that does not."""
    return backward_launch.gradients_in_order if in_order else backward_launch.gradients


@contextlib.contextmanager
def starting(problem: Problem, start: Callable[..., None], *, programs: int) -> Iterator[None]:
    """Kernels are started by `start`, as so many programs as are given."""
    grid = mock.patch.object(persistent, "programs", lambda blocks, device: (min(blocks, programs), 1, 1))
    both = (mock.patch.object(module, "launch", start) for module in (launch, backward_launch))
    with planned(problem.plan), torch.no_grad(), grid, next(both), next(both):
        yield


def _without_gradients(problem: Problem) -> Problem:
    return dataclasses.replace(problem, case=dataclasses.replace(problem.case, needs_grad=False))


def in_torch(problem: Problem, *, programs: int = 3) -> tuple[Tensor, Tensor]:
    """out and lse as the kernel leaves them, run by `gluon_in_torch`: rows to be computed again have an lse of NaN."""
    found, tensors = launched(_without_gradients(problem), programs=programs)
    kernel = launch.kernel_of(prepare(problem.text))
    arguments = found[kernel.fn.__name__]
    tensors["Lse"].fill_(12345.0)
    tensors["Out"].fill_(torch.nan)
    given: dict[str, Any] = {
        name: None if source is None else _flat(tensors[source]) for name, source in arguments.tensors.items()
    }
    given |= launching.as_taken(kernel.arg_names, arguments.numbers)
    gluon_in_torch.run(sys.modules[kernel.fn.__module__], kernel.fn.__name__, arguments.grid, given)
    return tensors["Out"], tensors["Lse"]


def outputs(problem: Problem, *, programs: int = 3) -> tuple[Tensor, Tensor]:
    """out and lse as the leaf op leaves them. The second kernel is Triton's, which its interpreter runs."""
    found, tensors = launched(_without_gradients(problem), programs=programs)
    out, lse = in_torch(problem, programs=programs)
    again = found.get("attention_again")
    if again is not None:
        same = replaying.CallCache(device=out.device)
        launching.launch(attention_again, same, {**tensors, "Out": out, "Lse": lse}, lambda: again)
    return out, lse


def results(problem: Problem, *, programs: int = 3, in_order: bool = False) -> list[Tensor]:
    """out, lse and the gradients as the leaf ops leave them. What no kernel writes is NaN. in_order: by the backward that adds up so."""
    out, lse = outputs(problem, programs=programs)
    grad_out, grad_lse = kernel_problems.upstream(problem, out, lse)
    read = (problem.q, problem.k, problem.v, grad_operands(problem))
    with emulated(problem, programs=programs, together=in_order):
        *grads, further = backward_of(in_order=in_order)(grad_out, grad_lse, *read, out, lse, problem.text)
    return [out, lse, *grads, *further]


@contextlib.contextmanager
def emulated(problem: Problem, *, programs: int, together: bool) -> Iterator[None]:
    """The backward's kernel is run by `gluon_in_torch`, those around it by Triton's interpreter. together: programs run at once."""

    def start(kernel: Any, same: Any, tensors: Any, arguments: Callable[[], Arguments], part: str = "") -> None:
        if kernel not in _EMULATED:
            launching.launch(kernel, replaying.CallCache(device=problem.q.device), tensors, arguments, part)
            return
        asked = arguments()
        for name in {asked.tensors[parameter] for parameter in _WRITTEN & asked.tensors.keys()}:
            tensors[name].fill_(torch.nan)
        given: dict[str, Any] = {
            name: None if source is None else _flat(tensors[source]) for name, source in asked.tensors.items()
        }
        given |= launching.as_taken(kernel.arg_names, asked.numbers)
        gluon_in_torch.run(sys.modules[kernel.fn.__module__], kernel.fn.__name__, asked.grid, given, together=together)

    with starting(problem, start, programs=programs):
        yield


def by_ops(problem: Problem, *, in_order: bool = False) -> list[Tensor]:
    """out and lse, and with gradients these, as the leaf ops give them on a GPU."""
    with planned(problem.plan), torch.no_grad():
        given = (problem.q, problem.k, problem.v)
        out, lse = torch.ops.attn_compiler.hopper(*given, operands(problem), problem.text)
        if not problem.case.needs_grad:
            return [out, lse]
        upstream = kernel_problems.upstream(problem, out, lse)
        read = (*given, grad_operands(problem), out, lse, problem.text)
        ops = torch.ops.attn_compiler
        *grads, further = (ops.hopper_in_order_backward if in_order else ops.hopper_backward)(*upstream, *read)
    return [out, lse, *grads, *further]


def _flat(x: Tensor) -> Tensor:
    """What lies in memory from its first element on."""
    bytes_of = x.view(torch.uint8) if x.dtype == torch.bool else x
    left = bytes_of.untyped_storage().nbytes() // bytes_of.element_size() - bytes_of.storage_offset()
    return bytes_of.detach().as_strided((left,), (1,))
