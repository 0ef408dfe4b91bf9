"""The run-time tensors that cuDNN reads besides q, k and v, as graph nodes. Sites that need the same tensor share one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Expr, Index, on_nodes
from attn_compiler.index_expr.on_nodes import Names
from attn_compiler.lowerings.base import Emitter, Operands
from attn_compiler.lowerings.cudnn import plan
from attn_compiler.lowerings.cudnn.plan import CudnnCall
from attn_compiler.lowerings.shared.parts import mask_nodes, part_tensors
from attn_compiler.spec import reads
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.masks import SEQLEN_KV, SEQLEN_Q

aten = torch.ops.aten

#: Seeds are drawn below this: the largest number of int64
_SEEDS = 2**63 - 1


def emit(emitter: Emitter, call: CudnnCall, spec: AttentionSpec, operands: Operands) -> list[fx.Node]:
    """Emit the operands in the order of `CudnnCall.operands`."""
    made = _Made(emitter, call, spec, operands)
    makers: dict[str, Callable[[], fx.Node]] = {
        "bias": made.bias,
        "sinks": made.sinks,
        "lengths_q": made.lengths_q,
        "lengths": made.lengths,
        "seed": made.seed,
        "offset": made.offset,
    }
    return [makers[name]() for name in call.operands]


@dataclass
class _Made:
    emitter: Emitter
    call: CudnnCall
    spec: AttentionSpec
    given: Operands

    def bias(self) -> fx.Node:
        """Emit the bias, (B|1, Hq|1, Sq|1, Skv) in q's dtype, contiguous, at an address that cuDNN can read."""
        if self.given.mask is None:
            raise ValueError("the call needs a tensor to add, and the site has none")
        added = mask_nodes.additive(self.emitter, self.given.mask, self._q.dtype)
        added = mask_nodes.with_adjacent_keys(self.emitter, added, self.given.k)
        value = self.emitter.value(added)
        if value.is_contiguous() and value.storage_offset() * value.element_size() % plan.ALIGNMENT == 0:
            return added
        packed = functools.partial(self.emitter.call, torch.clone, added, memory_format=torch.contiguous_format)
        return self.emitter.once(("packed", added), packed)

    def sinks(self) -> fx.Node:
        """Emit the sinks, float32 (Hq,), contiguous."""
        if self.given.sinks is None:
            raise ValueError("the call needs sinks, and the site has none")
        sinks = self.emitter.call(torch.Tensor.to, self.given.sinks, torch.float32)
        return self.emitter.call(torch.Tensor.contiguous, sinks)

    def lengths_q(self) -> fx.Node:
        """Emit int32 (B,): all queries."""
        batch, queries = self._q.shape[0], self._q.shape[2]
        return self._once("all queries", lambda: self._full([batch], queries, torch.int32))

    def lengths(self) -> fx.Node:
        """Emit int32 (B,): the keys of each batch row, from none to all."""
        if self.call.counted:
            keys = self.emitter.value(self.given.k).shape[2]
            return self._once("all keys", lambda: self._full([self._q.shape[0]], keys, torch.int32))
        length = plan.length(self.spec)
        if length is None:
            raise ValueError("the call needs lengths, and the mask has none")
        tensors = sorted((name, self.given.loads[name]) for name in reads.names_in(length) & self.given.loads.keys())

        def make() -> fx.Node:
            value = on_nodes.emit(self.emitter, length, self._names(length))
            value = self.emitter.call(aten.expand.default, value, [self._q.shape[0]])
            value = self.emitter.call(torch.clamp, value, 0, self.emitter.value(self.given.k).shape[2])
            return self.emitter.call(torch.Tensor.contiguous, self.emitter.call(torch.Tensor.to, value, torch.int32))

        return self._once("lengths", make, length, *tensors)

    def seed(self) -> fx.Node:
        """Emit int64 (1,), of the graph's own random numbers. The backward gets the same."""
        return self.emitter.call(torch.randint, 0, _SEEDS, (1,), dtype=torch.int64, device=self._q.device)

    def offset(self) -> fx.Node:
        """Emit int64 (1,), zero: each call has a seed of its own, and draws from its beginning."""
        return self._once("offset", lambda: self._full([1], 0, torch.int64))

    # ---- helpers --------------------------------------------------------------------------------------------------

    def _names(self, length: Expr) -> Names:
        device, batch = self._q.device, self._q.shape[0]
        indices = (
            {"b": self.emitter.call(torch.arange, batch, device=device)} if ix.mentions(length, Index("b")) else {}
        )
        sizes = {SEQLEN_Q.name: self._q.shape[2], SEQLEN_KV.name: self.emitter.value(self.given.k).shape[2]}
        return Names(
            device=device,
            indices=indices,
            sizes=sizes | part_tensors.sizes_in(self.emitter, self.given, [length]),
            tensors=self.given.loads,
        )

    def _full(self, shape: list[int], value: int, dtype: torch.dtype) -> fx.Node:
        return self.emitter.call(torch.full, shape, value, dtype=dtype, device=self._q.device)

    def _once(self, name: str, make: Callable[[], fx.Node], *of: object) -> fx.Node:
        sizes = (self.spec.batch, self.spec.seqlen_q, self.spec.seqlen_kv, self._q.device)
        return self.emitter.once((f"cudnn {name}", of, sizes), make)

    @property
    def _q(self) -> torch.Tensor:
        return self.emitter.value(self.given.q)
