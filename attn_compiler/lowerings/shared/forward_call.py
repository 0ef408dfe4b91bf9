"""What our kernels' forwards share on tensors: what is allocated, what is launched the first time, and replayed after that.

Imports triton, so it comes late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from attn_compiler.lowerings.shared.arguments import Prepared, Tensors, prepare
from attn_compiler.lowerings.shared.launching import Alike, Ready, Site, alike
from attn_compiler.lowerings.shared.on_device import on
from attn_compiler.lowerings.shared.ops import empty_outputs
from attn_compiler.lowerings.shared.readable import is_unreadable, readable

#: of a call, by name
Named = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """op: the leaf op's name.
    operands: names of those that the leaf op takes, in order.
    run: launches the kernels on Q, K, V, Out, Lse and the operands. Gives what `launch` gave, in order.
    """

    op: str
    operands: Callable[[Prepared], tuple[str, ...]]
    run: Callable[[Prepared, Alike, Named], list[Ready | None]]

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, text: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse, as `ops.LEAF_SCHEMA` says."""
        inputs = (q, k, v, *operands)
        same = alike(self.op, text, inputs)
        if same.replay is not None:
            out, lse = same.replay.run(inputs)
            return out, lse
        prepared = prepare(text)
        same.any_size = prepared.any_size
        if same.fact("unreadable", lambda: is_unreadable(q, k, v)):
            return self(readable(q), readable(k), readable(v), operands, text)
        names = self.operands(prepared)
        tensors = {"Q": q, "K": k, "V": v, **dict(zip(names, operands, strict=True))}
        with on(q.device):
            tensors["Out"] = same.empty("Out", lambda: empty_outputs(q, v)[0])
            tensors["Lse"] = same.empty("Lse", lambda: empty_outputs(q, v)[1])
            ran = self.run(prepared, same, tensors)
        same.keep(ran, inputs=("Q", "K", "V", *names), returned=("Out", "Lse"))
        return tensors["Out"], tensors["Lse"]


class ForwardSite(Site):
    """A forward for one place in compiled code."""

    __slots__ = ()
    forward: ClassVar[Forward]

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, text: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = (q, k, v, *operands)
        found = self.again(inputs)
        if found is None:
            out, lse = self.forward(q, k, v, operands, text)
            self.learn(self.forward.op, text, inputs)
            return out, lse
        return found[0], found[1]
