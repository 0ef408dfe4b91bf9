"""Replay of decode launches at one place in compiled code, for tensors with the same layout in each call, as those of a static cache.

After the first call only addresses are checked. Imports triton, so it is imported late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_compiler.lowerings.shared.launching.launch import Grid, ReadyKernel
from attn_compiler.lowerings.shared.launching.on_device import Empty
from attn_compiler.lowerings.shared.launching.replaying import BETWEEN, Replay, replay_of

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """Arguments of one launch. tensors: its first parameters, None where one is absent. values: its other parameters."""

    compiled: Any
    grid: Grid
    tensors: tuple[torch.Tensor | None, ...]
    values: tuple[Any, ...]


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
