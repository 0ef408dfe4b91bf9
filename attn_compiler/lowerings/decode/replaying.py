"""Launches of decode kernels, and their replay at one place in compiled code, for tensors that lie alike in each call.

Tensors of a static cache lie alike. After the first call only addresses are checked. This module imports Triton, so others import it late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attn_compiler.lowerings.decode.plan import DecodePlan, Schedule
from attn_compiler.lowerings.shared.launching.dry_run import noter
from attn_compiler.lowerings.shared.launching.launch import Grid, ReadyKernel, first_launch, plain, start
from attn_compiler.lowerings.shared.launching.on_device import Empty
from attn_compiler.lowerings.shared.launching.replaying import BETWEEN, Replay, replay_of
from attn_compiler.torch_private.compat import empty_strided

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """Arguments of one launch. tensors: its first parameters, None where one is absent. values: its other parameters."""

    compiled: Any
    grid: Grid
    tensors: tuple[torch.Tensor | None, ...]
    values: tuple[Any, ...]


#: a kernel and its constants, by the kernel and all that it is compiled for besides the text of the call
Known = dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]]


@dataclass(frozen=True, kw_only=True)
class PreparedCall:
    """A call in the kernels' terms.

    constants: compile-time arguments of the Triton kernel, without the alignment.
    given: for each parameter from Bounds on, its place among the operands, or None.
    typed: the places of those operands whose dtype the text does not hold.
    compiled: a kernel and its constants, by everything else that it was compiled for.
    """

    schedule: Schedule
    plan: DecodePlan
    scale: float
    changed_by: float
    constants: dict[str, Any]
    given: tuple[int | None, ...]
    typed: tuple[int, ...]
    compiled: Known = field(default_factory=dict)


def launch(
    known: Known,
    kernel: Any,
    key: tuple[Any, ...],
    grid: Grid,
    tensors: tuple[torch.Tensor | None, ...],
    numbers: tuple[int | float, ...],
    how: Callable[[], Any],
    launched: list[Launched] | None,
    **options: int,
) -> None:
    """Launch a kernel. A known one is launched without Triton's own dispatch, which inspects every argument to find it again.

    key: all that it is compiled for besides the text; its first entry is the device.
    tensors, numbers: in the kernel's order.
    how: makes the constants; called the first time only.
    launched: gets the launch if a further call launches the same.
    options: Triton's.
    """
    found = known.get((id(kernel), *key))
    if found is None:
        switches = how()
        early = {"launch_pdl": True} if getattr(switches, "EARLY", False) else {}
        compiled = first_launch(kernel, grid, *tensors, *numbers, HOW=switches, **options, **early)
        if compiled is None:
            return
        found = known[id(kernel), *key] = compiled, plain(switches)
    else:
        addresses = [None if x is None else x.data_ptr() for x in tensors]
        start(found[0], grid, key[0], (*addresses, *numbers, found[1]))
    if launched is not None:
        launched.append(Launched(compiled=found[0], grid=grid, tensors=tensors, values=(*numbers, found[1])))


def empty(size: tuple[int, ...], strides: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Allocate float32; without memory where launches are noted."""
    if noter() is not None:
        return torch.empty_strided(size, strides, dtype=torch.float32, device=like.device)
    return empty_strided(size, strides, torch.float32, like.device.type)


class DecodeSite:
    """Like `leaf_calls.ForwardSite`, for a body that recognises repeated calls in its own way.

    body: the leaf op's; after its five arguments it takes a list, and appends its launches if a further call launches the same.
    read: returns the tensors of a call that the kernels read.
    """

    __slots__ = ("body", "read", "replay")

    def __init__(
        self,
        body: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        read: Callable[..., tuple[torch.Tensor, ...]],
    ) -> None:
        self.body, self.read = body, read
        self.replay: Replay | None = None

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, text: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.replay is not None:
            found: tuple[torch.Tensor, torch.Tensor] | None = self.replay.run([*self.read(q, k, v, operands)], BETWEEN)
            if found is not None:
                return found
        launched: list[Launched] = []
        outputs = self.body(q, k, v, operands, text, launched)
        if launched:
            self.replay = replay(self.read(q, k, v, operands), outputs, launched)
        return outputs


def replay(inputs: Tensors, outputs: tuple[torch.Tensor, torch.Tensor], launched: Sequence[Launched]) -> Replay | None:
    """Build the replay of such a call; None where one tensor has two roles, or an address is no multiple of a vector.

    Each call allocates those tensors of the launches that are no inputs.
    """
    names = {id(x): f"input {i}" for i, x in enumerate(inputs)}
    if len(names) < len(inputs) or any(x.data_ptr() & BETWEEN for x in inputs):
        return None
    given, empties = list(names.values()), dict[str, Empty]()
    for x in (*outputs, *(x for one in launched for x in one.tensors if x is not None)):
        if id(x) not in names:
            names[id(x)] = name = f"made {len(empties)}"
            empties[name] = Empty.like(x)
    ready = [
        ReadyKernel(
            kernel=None,
            compiled=one.compiled,
            grid=one.grid,
            values=[*(None for _ in one.tensors), *one.values],
            where=tuple((i, names[id(x)]) for i, x in enumerate(one.tensors) if x is not None),
        )
        for one in launched
    ]
    out, lse = outputs
    return replay_of(inputs[0].device, ready, empties, inputs=given, returned=(names[id(out)], names[id(lse)]))
