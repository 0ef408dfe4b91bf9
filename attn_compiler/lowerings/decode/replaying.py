"""One place in compiled code that calls a kernel for decoding with tensors that lie the same each time, as those of a static cache do.

After its first call addresses are all that is asked. Imports triton, so it comes late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attn_compiler.lowerings.shared.launching import VECTOR, Grid, Replay, Site
from attn_compiler.lowerings.shared.on_device import Empty

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """What one kernel was launched with. tensors: its first parameters, None where one is absent. values: its other parameters."""

    compiled: Any
    grid: Grid
    tensors: tuple[torch.Tensor | None, ...]
    values: tuple[Any, ...]


class DecodeSite(Site):
    """body: the leaf op's; after its five arguments it takes a list, and adds what it launched if a further call launches the same.
    read: of a call's tensors, those that the kernels read."""

    __slots__ = ()
    body: ClassVar[Callable[..., tuple[torch.Tensor, torch.Tensor]]]
    read: ClassVar[Callable[..., tuple[torch.Tensor, ...]]]

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, text: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cls = type(self)
        inputs = cls.read(q, k, v, operands)
        found = self.again(inputs)
        if found is not None:
            return found[0], found[1]
        launched: list[Launched] = []
        outputs = cls.body(q, k, v, operands, text, launched)
        if launched:
            self._replay = replay(inputs, outputs, launched)
        return outputs


def replay(inputs: Tensors, outputs: Tensors, launched: Sequence[Launched]) -> Replay | None:
    """What runs such a call again; None where one tensor has two roles, or an address is no multiple of a vector.

    What was launched with and is no input is allocated by each call.
    """
    index = {id(x): i for i, x in enumerate(inputs)}
    if len(index) < len(inputs) or any(x.data_ptr() % VECTOR for x in inputs):
        return None
    allocated: list[torch.Tensor] = []
    for x in (*outputs, *(x for one in launched for x in one.tensors if x is not None)):
        if id(x) not in index:
            index[id(x)] = len(inputs) + len(allocated)
            allocated.append(x)
    return Replay(
        device=inputs[0].get_device(),
        allocate=tuple(Empty.like(x).make for x in allocated),
        launches=tuple(
            (
                one.compiled,
                one.grid,
                [*(None for _ in one.tensors), *one.values],
                tuple((i, index[id(x)]) for i, x in enumerate(one.tensors) if x is not None),
            )
            for one in launched
        ),
        returned=tuple(index[id(x)] for x in outputs),
    )
