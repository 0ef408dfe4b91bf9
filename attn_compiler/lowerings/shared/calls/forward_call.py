"""Steps that our kernels' forwards share: allocation, first launches, and replay afterwards. Imports triton, so it is imported late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attn_compiler.lowerings.shared.calls.arguments import Named, Prepared, is_unreadable, prepare, readable
from attn_compiler.lowerings.shared.calls.by_definition import Attention
from attn_compiler.lowerings.shared.calls.leaf_calls import ForwardArguments, ForwardBody, Outputs
from attn_compiler.lowerings.shared.launching.launch import ReadyKernel
from attn_compiler.lowerings.shared.launching.on_device import on
from attn_compiler.lowerings.shared.launching.replaying import CallCache
from attn_compiler.lowerings.shared.ops.leaf_ops import empty_outputs

#: q, k and v
Exact = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward(ForwardBody):
    """A forward by our kernels.

    operands: names of those that the leaf op takes, in order.
    run: launches the kernels on Q, K, V, Out, Lse and the operands. Returns the results of `launch`, in order.
    restore: computes q, k and v from operands, for an op that reads only shapes and dtypes of its own q, k and v; None where it reads them.
    """

    operands: Callable[[Prepared], tuple[str, ...]]
    run: Callable[[Prepared, CallCache, Named], list[ReadyKernel | None]]
    restore: Callable[[Prepared, Named], Exact] | None = None

    def definition(self, given: ForwardArguments) -> Attention:
        prepared = prepare(given.text)
        tensors = dict(zip(self.operands(prepared), given.operands, strict=True))
        exact = (given.q, given.k, given.v) if self.restore is None else self.restore(prepared, tensors)
        return prepared.attention(*exact, tensors)

    def first(self, given: ForwardArguments, same: CallCache) -> Outputs:
        q, k, v, operands, text = given
        prepared = prepare(text)
        same.any_size = prepared.any_size
        if self.restore is None and same.fact("unreadable", lambda: is_unreadable(q, k, v)):
            return self(readable(q), readable(k), readable(v), operands, text)
        names = self.operands(prepared)
        tensors = {"Q": q, "K": k, "V": v, **dict(zip(names, operands, strict=True))}
        with on(q.device):
            tensors["Out"] = same.empty("Out", lambda: empty_outputs(q, v)[0])
            tensors["Lse"] = same.empty("Lse", lambda: empty_outputs(q, v)[1])
            ran = self.run(prepared, same, tensors)
            if prepared.call.spec.mask.means:
                # Late, as in backward_call.py: few models need these kernels, and defining them takes time in each process.
                from attn_compiler.lowerings.shared.calls import keyless_launch

                ran = [*ran, *keyless_launch.fill(prepared, same, tensors)]
        same.keep(ran, inputs=("Q", "K", "V", *names), returned=("Out", "Lse"))
        return tensors["Out"], tensors["Lse"]
