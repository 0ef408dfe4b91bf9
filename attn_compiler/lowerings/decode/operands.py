"""Run-time tensors that the decode kernel reads, as graph nodes: each is made once for all sites that need the same."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import fx

from attn_compiler.index_expr import on_nodes
from attn_compiler.lowerings.base import Emitter, Operands
from attn_compiler.lowerings.decode import plan as decode_plan
from attn_compiler.lowerings.decode.plan import DecodeCall
from attn_compiler.lowerings.shared.parts import part_tensors

aten = torch.ops.aten


def emit(emitter: Emitter, call: DecodeCall, operands: Operands) -> tuple[str, list[fx.Node]]:
    """Return the leaf op's text and its operands in the order of `Plan.operands`."""
    parts = decode_plan.parts(call.spec)
    made = part_tensors.emit_parts(emitter, call.spec, operands, parts)
    making = _Making(emitter, call, operands)
    has_keys = making.has_keys(made)
    if has_keys is not None:
        call = dataclasses.replace(call, by_head=emitter.value(has_keys).shape[1] != 1)
    plan = decode_plan.plan_of(call)
    if plan.count:
        made["count"] = making.count()
    if plan.bounds:
        only_masks = not decode_plan.masks_by_bias(call.spec, parts)
        made["bounds"] = making.bounds(made, has_keys, only_masks=only_masks)
    if operands.stored is not None:
        scales = {"k_scale": operands.stored.k_scale, "v_scale": operands.stored.v_scale}
        made |= {name: node for name, node in scales.items() if node is not None}
    if operands.latent is not None and operands.latent.rope is not None:
        made["rope"] = operands.latent.rope
    return call.to_text(), [made[name] for name in plan.operands]


@dataclass(frozen=True)
class _Making:
    emitter: Emitter
    call: DecodeCall
    given: Operands

    def count(self) -> fx.Node:
        """Emit the counters, one tensor for all sites of a graph: the kernel leaves it zero."""
        tiles = decode_plan.known(self.call.spec.num_heads_kv) * decode_plan.rows_of(self.call.spec)[1]
        batch = on_nodes.size_of(self.emitter, self.given.q, 0)
        length = batch * tiles if isinstance(batch, int) else self._call(operator.mul, batch, tiles)
        key = ("decode count", self.call.spec.batch, tiles, self._device)
        leaf = torch.ops.attn_compiler.decode_count.default
        return self.emitter.once(key, lambda: self._call(leaf, self.given.q, length))

    def has_keys(self, made: Mapping[str, fx.Node]) -> fx.Node | None:
        """Return bool (B|1, Hq|1, Sq|1, 1), the queries that have keys; None where rows without keys are 0, or their intervals are empty
        anyway."""
        masks = {name: self.emitter.value(made[name]) for name in ("rows", "keys", "mask", "bias") if name in made}
        is_one = len(masks) == 1 and (self.given.has_keys is None or "bias" not in masks)
        differ = any(mask.dim() == 4 and mask.shape[1] != 1 for mask in masks.values())
        if not self.call.spec.mask.means or (is_one and not differ):
            return None
        if self.given.has_keys is not None:
            return self.given.has_keys
        key = ("decode has keys", made["bias"])
        return self.emitter.once(key, lambda: self._call(torch.any, self._is_above(made["bias"]), -1, True))

    def bounds(self, made: Mapping[str, fx.Node], has_keys: fx.Node | None, *, only_masks: bool) -> fx.Node:
        """Emit int32 (2, B|1, Sq): the rows' intervals, cut at both ends by keys and masks. Queries without has_keys get empty ones, then
        (2, B|1, Hq · Sq) where heads differ in those.

        only_masks: no tensor that is added counts as a mask.
        """
        masks = {name: made[name] for name in ("keys", "mask") if name in made}
        if not only_masks:
            masks["bias"] = made["bias"]
        rows = made.get("rows")
        key = ("decode bounds", rows, tuple(masks.items()), has_keys, self.call.spec.seqlen_q, self.call.spec.seqlen_kv)
        leaf = torch.ops.attn_compiler.decode_bounds.default
        return self.emitter.once(key, lambda: self._call(leaf, self._bounds(rows, masks, has_keys)))

    def _bounds(self, rows: fx.Node | None, masks: Mapping[str, fx.Node], has_keys: fx.Node | None) -> fx.Node:
        if not masks and rows is not None and has_keys is None:
            return rows
        extents = [_EXTENTS[name](self, mask) for name, mask in masks.items()]
        if rows is not None:
            extents.append((self._call(aten.select.int, rows, 0, 0), self._call(aten.select.int, rows, 0, 1)))
        if not extents:
            first, end = (self._call(torch.full, (1, 1), x, device=self._device) for x in (0, self._seqlen_kv))
            extents.append((first, end))
        firsts, ends = zip(*extents, strict=True)
        sides = [
            reduce(lambda a, b: self._call(torch.maximum, a, b), firsts),
            reduce(lambda a, b: self._call(torch.minimum, a, b), ends),
        ]
        if has_keys is not None:
            sides = [self._or_none(x, has_keys) for x in sides]
        queries = decode_plan.known(self.call.spec.seqlen_q)
        sides = [
            self._call(aten.expand.default, x, [*[-1] * (self.emitter.value(x).dim() - 1), queries]) for x in sides
        ]
        stacked = self._call(torch.flatten, self._call(torch.stack, sides), 2)
        return self._call(torch.Tensor.to, stacked, torch.int32)

    def _or_none(self, x: fx.Node, has_keys: fx.Node) -> fx.Node:
        """Return one side of the intervals, (B|1, Sq|1), as (B|1, Hq|1, Sq|1), empty where has_keys is False."""
        return self._call(torch.where, self._call(torch.squeeze, has_keys, -1), self._call(torch.unsqueeze, x, 1), 0)

    def of_keys(self, keys: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Return first and end, (B|1, 1) each, of bool (B|1, Skv)."""
        return self._extent(keys, [1])

    def of_mask(self, mask: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Return first and end, (B|1, Sq|1) each, over all heads of bool (B|1, Hq|1, Sq|1, Skv|1)."""
        return self._extent(mask, [1, 3])

    def of_bias(self, bias: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Return first and end of an added tensor, as `of_mask`."""
        return self._extent(self._is_above(bias), [1, 3])

    def _is_above(self, bias: fx.Node) -> fx.Node:
        """Return where the bias is above its dtype's lowest number, which masks, as everywhere (patterns/score_steps.py)."""
        return self._call(torch.gt, bias, torch.finfo(self.emitter.value(bias).dtype).min)

    def _extent(self, allowed: fx.Node, axes: list[int]) -> tuple[fx.Node, fx.Node]:
        """Return the first allowed key and the one after the last, int64; first is beyond end where no key is allowed."""
        length = self._seqlen_kv
        at = self._call(torch.arange, length, device=self._device)
        first = self._call(torch.amin, self._call(torch.where, allowed, at, length), axes)
        end = self._call(torch.amax, self._call(torch.where, allowed, self._call(torch.add, at, 1), 0), axes)
        if len(axes) == 1:
            return self._call(torch.unsqueeze, first, 1), self._call(torch.unsqueeze, end, 1)
        return first, end

    @property
    def _seqlen_kv(self) -> int | fx.Node:
        return on_nodes.size_of(self.emitter, self.given.k, 2)

    @property
    def _device(self) -> torch.device:
        return self.emitter.value(self.given.q).device

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.emitter.call(function, *args, **kwargs)


_EXTENTS: Mapping[str, Callable[[_Making, fx.Node], tuple[fx.Node, fx.Node]]] = {
    "keys": _Making.of_keys,
    "mask": _Making.of_mask,
    "bias": _Making.of_bias,
}
