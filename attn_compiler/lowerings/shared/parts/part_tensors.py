"""The run-time tensors that the Triton kernels read, as graph nodes. Sites with equal needs share them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Expr, Index, on_nodes
from attn_compiler.index_expr.on_nodes import Names
from attn_compiler.lowerings.base import Emitter, Operands, Tiles
from attn_compiler.lowerings.shared.ops import documents
from attn_compiler.lowerings.shared.parts import mask_nodes, site_parts, tiles as tile_lists
from attn_compiler.lowerings.shared.parts.intervals import Interval
from attn_compiler.lowerings.shared.parts.kernel_plan import Plan
from attn_compiler.lowerings.shared.parts.site_parts import Parts
from attn_compiler.lowerings.shared.parts.tiles import Masking
from attn_compiler.spec import reads
from attn_compiler.spec.added_scores import ProvedScore, RelativeBias
from attn_compiler.spec.attention import AttentionSpec, Dim
from attn_compiler.spec.masks import SEQLEN_KV, SEQLEN_Q

aten = torch.ops.aten

B = Index("b")

Size = int | fx.Node

#: copies of numbers by distance: elements of the widest vector that a kernel loads
_COPIES = 8

#: upper bound of seeds: the largest int64
_SEEDS = 2**63 - 1


def emit(
    emitter: Emitter, spec: AttentionSpec, operands: Operands, tiles: Tiles, *, ordered: bool = False
) -> list[fx.Node]:
    """Return the operands of the leaf op in the order of `Plan.operands`. ordered: as `tiles.lists` says."""
    plan, parts = site_parts.make_plan(spec), site_parts.parts(spec)
    made = _Made(emitter, spec, operands).all_of(plan, parts, tiles, ordered=ordered)
    return [made[name] for name in plan.operands]


def emit_parts(emitter: Emitter, spec: AttentionSpec, operands: Operands, parts: Parts) -> dict[str, fx.Node]:
    """Return the tensors of the parts by the names that `Plan` gives them: all but lists of tiles and a seed."""
    return _Made(emitter, spec, operands).all_of_parts(parts)


def sizes_in(emitter: Emitter, operands: Operands, used: Iterable[Expr]) -> dict[str, Size]:
    """Return nodes of the symbolic sizes that expressions name."""
    given = operands.sizes
    names = {name for x in used for name in ix.sizes(x)} & given.keys()
    return {name: on_nodes.size_of(emitter, given[name].node, given[name].axis) for name in sorted(names)}


def lengths(emitter: Emitter, spec: AttentionSpec, operands: Operands) -> tuple[Size, Size]:
    """Return the lengths of queries and of keys: numbers, or the nodes that the tensors here are made with."""
    made = _Made(emitter, spec, operands)
    return made.seqlen_q, made.seqlen_kv


@dataclass
class _Made:
    emitter: Emitter
    spec: AttentionSpec
    given: Operands

    def all_of(self, plan: Plan, parts: Parts, tiles: Tiles, *, ordered: bool) -> dict[str, fx.Node]:
        """Make the tensors of all parts, tile lists and a dropout seed, by name. They include every operand of the plan."""
        made = self.all_of_parts(parts)
        if plan.bias:
            made["bias"] = mask_nodes.in_vectors(self.emitter, made["bias"], self.given.q)
        if plan.tiles:
            masking = self._masking_of(parts, made)
            made["tiles"] = tile_lists.lists(self.emitter, masking, tiles, by_key=False, ordered=ordered)
            if plan.needs_grad:
                by_key = tile_lists.lists(self.emitter, masking, tiles, by_key=True, ordered=ordered)
                made["tiles_by_key"] = by_key
        if plan.dropout:
            made["seed"] = self._call(torch.randint, 0, _SEEDS, (1,), dtype=torch.int64, device=self._device)
        return made

    def all_of_parts(self, parts: Parts) -> dict[str, fx.Node]:
        """Return by name the tensors that follow from the parts alone."""
        made = self._masking(parts)
        if parts.bias:
            made["bias"] = self._as_four(self._tensor())
        if parts.distances:
            made["distances"] = self._distances(parts.distances, with_grad=parts.distances_grad)
        if parts.slopes is not None:
            made["slopes"] = self._slopes(parts.slopes)
        if self.given.sinks is not None:
            made["sinks"] = self._call(torch.Tensor.contiguous, self.given.sinks)
        return made

    # ---- masks ----------------------------------------------------------------------------------------------------

    def _masking(self, parts: Parts) -> dict[str, fx.Node]:
        made: dict[str, fx.Node] = {}
        if parts.rows is not None:
            made["rows"] = self._rows(parts.rows)
        if parts.keys is not None:
            made["keys"] = self._of_axis("keys", parts.keys, torch.bool)
        if parts.keys_given:
            made["keys"] = self._given_keys()
        if parts.documents is not None:
            made["documents_q"], made["documents_k"] = self._documents(parts.documents)
        if parts.mask:
            made["mask"] = self._truth_of_tensor() if parts.rest is None else self._of_pairs(parts.rest)
        return made

    def _masking_of(self, parts: Parts, made: Mapping[str, fx.Node]) -> Masking:
        documents = (made["documents_q"], made["documents_k"]) if "documents_q" in made else None
        return Masking(
            device=self._device,
            seqlen_q=self.seqlen_q,
            seqlen_kv=self.seqlen_kv,
            band=parts.band,
            rows=made.get("rows"),
            keys=made.get("keys"),
            documents=documents,
            mask=made.get("mask"),
        )

    def _rows(self, interval: Interval) -> fx.Node:
        """Return int32 (2, B|1, Sq): the first key that each query may use, and the one after the last, clipped to the keys."""
        lower = ix.ZERO if interval.lower is None else interval.lower
        upper = SEQLEN_KV if interval.upper is None else interval.upper

        def make() -> fx.Node:
            names = self._names({"q": self._along(self.seqlen_q, 0)}, (lower, upper), self.given.loads)
            batch = self._batch if any(ix.mentions(x, B) for x in (lower, upper)) else 1
            values = [on_nodes.emit(self.emitter, x, names) for x in (lower, upper)]
            sides = [self._expanded(x, batch, self.seqlen_q) for x in values]
            rows = self._call(torch.clamp, self._call(torch.stack, sides), 0, self.seqlen_kv)
            return self._call(torch.Tensor.to, rows, torch.int32)

        return self._once("rows", (lower, upper), self.given.loads, make)

    def _of_axis(self, name: str, x: Expr, dtype: torch.dtype, axis: str = "k") -> fx.Node:
        """Evaluate an expression over (b, axis), for keys or queries: (B|1, Skv) or (B|1, Sq), contiguous."""
        length = self.seqlen_kv if axis == "k" else self.seqlen_q

        def make() -> fx.Node:
            names = self._names({axis: self._along(length, 0)}, (x,), self.given.loads)
            value = on_nodes.emit(self.emitter, x, names)
            batch = self._batch if ix.mentions(x, B) else 1
            return self._packed(self._expanded(value, batch, length), dtype)

        return self._once(name, (x,), self.given.loads, make)

    def _documents(self, of_key: Expr) -> tuple[fx.Node, fx.Node]:
        """Return int32 (B|1, Sq) and (B|1, Skv): equal where the documents are, whatever numbers the model gives them.

        Numbers that fit into int32 stay. Others are numbered by an op (shared/ops/documents.py).
        """
        of_query = ix.substitute(of_key, Index("k"), Index("q"))
        if self._fits(of_key):
            queries = self._of_axis("queries", of_query, torch.int32, "q")
            return queries, self._of_axis("documents", of_key, torch.int32)
        is_same = self.seqlen_q is self.seqlen_kv or self.seqlen_q == self.seqlen_kv

        def made() -> fx.Node:
            keys = None if is_same else self._of_axis("document numbers", of_key, torch.int64)
            return self._call(documents.OP, self._of_axis("query numbers", of_query, torch.int64, "q"), keys)

        numbered = self._once("document numbers of both", (of_key,), self.given.loads, made)

        def part(at: int) -> fx.Node:
            return self._once(f"documents {at}", (numbered,), {}, lambda: self._call(operator.getitem, numbered, at))

        return part(0), part(0 if is_same else 1)

    def _fits(self, x: Expr) -> bool:
        """Return whether a whole number fits into int32: a truth value, or read from a tensor of at most that width."""
        if ix.kind_of(x) == "bool":
            return True
        if not isinstance(x, ix.Load) or x.tensor not in self.given.loads:
            return False
        dtype = self.emitter.value(self.given.loads[x.tensor]).dtype
        return dtype == torch.bool or (dtype.itemsize <= 4 and dtype != torch.uint32)

    def _of_pairs(self, x: Expr) -> fx.Node:
        """Evaluate a condition over (b, h, q, k): bool (B|1, Hq|1, Sq|1, Skv|1)."""
        sizes = {"b": self._batch, "h": self._heads, "q": self.seqlen_q, "k": self.seqlen_kv}

        def make() -> fx.Node:
            used = [(axis, name) for axis, name in enumerate(sizes) if ix.mentions(x, Index(name))]
            indices = {name: self._along(sizes[name], 3 - axis) for axis, name in used}
            return self._as_four(
                on_nodes.emit(self.emitter, ix.as_bool(x), self._names(indices, (x,), self.given.loads))
            )

        return self._once("pairs", (x,), self.given.loads, make)

    def _given_keys(self) -> fx.Node:
        """Return the dense tensor as truth values of keys."""
        mask = self._truth_of_tensor()

        def make() -> fx.Node:
            of_keys = self._call(aten.select.int, self._call(aten.select.int, mask, 1, 0), 1, 0)
            return self._call(torch.Tensor.contiguous, of_keys)

        return self._once("given keys", (mask,), {}, make)

    def _truth_of_tensor(self) -> fx.Node:
        """Return the dense tensor as bool (B|1, Hq|1, Sq|1, Skv|1). A float one allows pairs where it holds 0, or a row's highest
        number."""
        tensor = self._as_four(self._tensor())
        if self.emitter.value(tensor).dtype == torch.bool:
            return tensor
        if self.spec.score.by_highest:

            def highest() -> fx.Node:
                return self._call(torch.eq, tensor, self._call(torch.amax, tensor, -1, True))

            return self._once("highest", (tensor,), {}, highest)
        return self._once("truth", (tensor,), {}, lambda: self._call(torch.eq, tensor, 0))

    # ---- scores ---------------------------------------------------------------------------------------------------

    def _slopes(self, slopes: Expr) -> fx.Node:
        """Return the slopes, float32 (Hq,)."""

        def make() -> fx.Node:
            names = self._names({"h": self._along(self._heads, 0)}, (slopes,), self.given.score_loads)
            value = on_nodes.emit(self.emitter, slopes, names)
            expanded = self._call(aten.expand.default, value, [self._heads])
            return self._packed(self._call(torch.Tensor.detach, expanded), torch.float32)

        return self._once("slopes", (slopes,), self.given.score_loads, make)

    def _distances(self, kinds: tuple[ProvedScore, ...], *, with_grad: bool) -> fx.Node:
        """Return biases by k - q + Sq - 1, (Hq|1, 8, L), in the 8 copies that `Plan` asks for.

        They are evaluated at one pair of each distance: k = max(distance, 0), q = max(-distance, 0) are valid indices.
        """
        summands = tuple(kind.summand for kind in kinds)

        def make() -> fx.Node:
            distance = self._distance()
            indices = {
                "h": self._along(self._heads, 1),
                "k": self._call(torch.clamp, distance, min=0),
                "q": self._call(torch.clamp, self._call(torch.neg, distance), min=0),
            }
            names = self._names(indices, summands, self.given.score_loads)
            # The model computes in float32 before it rounds to whole numbers, and so do these nodes.
            values = [on_nodes.emit(self.emitter, x, names, real=torch.float32) for x in summands]
            total = reduce(lambda a, b: self._call(torch.add, a, b), values)
            total = total if with_grad else self._call(torch.Tensor.detach, total)
            if self.emitter.value(total).dim() < 2:
                total = self._call(torch.add, total, self._call(torch.zeros_like, distance))
            return self._in_copies(self._packed(total, self._distances_dtype(kinds)))

        return self._once(f"distances {with_grad}", summands, self.given.score_loads, make)

    def _distances_dtype(self, kinds: tuple[ProvedScore, ...]) -> torch.dtype:
        """Return float32, or q's dtype if the only source is a table in that dtype: half as much to load, and nothing lost."""
        own = self.emitter.value(self.given.q).dtype
        tables = [kind.table for kind in kinds if isinstance(kind, RelativeBias) and kind.weight == 1.0]
        exact = len(tables) == len(kinds) == 1 and self.emitter.value(self.given.score_loads[tables[0]]).dtype == own
        return own if exact else torch.float32

    def _in_copies(self, values: fx.Node) -> fx.Node:
        """Return (Hq|1, Sq + Skv - 1) eight times, each shifted by one more, padded to a multiple of 8 with numbers that are never used.
        Kernels give a gradient to the first copy alone, so no gradients have to be summed."""
        count = self._number(operator.add, self.seqlen_q, self.seqlen_kv)
        blocks = self._number(operator.floordiv, self._number(operator.add, count, _COPIES - 1), _COPIES)
        length = self._number(operator.mul, blocks, _COPIES)
        at = self._call(torch.add, self._along(_COPIES, 1), self._along(length, 0))
        at = self._call(torch.clamp, at, max=self._number(operator.sub, count, 2))
        moved = self._call(aten.index.Tensor, self._call(torch.Tensor.detach, values), [None, at])
        if not self.emitter.value(values).requires_grad:
            return moved
        beyond = self._number(operator.sub, length, self._number(operator.sub, count, 1))
        first = self._call(torch.unsqueeze, self._call(aten.constant_pad_nd.default, values, [0, beyond]), 1)
        # Inductor fails on a concatenation with copies 1 to 7: "The argument '((-1)) + 1' is not comparable."
        return self._call(aten.slice_scatter.default, moved, first, 1, 0, 1)

    def _distance(self) -> fx.Node:
        """Return int64 (1, Sq + Skv - 1): -(Sq - 1) up to Skv - 1."""
        queries, keys = self.seqlen_q, self.seqlen_kv
        first = self._number(operator.sub, 1, queries)
        return self._call(torch.unsqueeze, self._call(torch.arange, first, keys, device=self._device), 0)

    # ---- tensors --------------------------------------------------------------------------------------------------

    def _tensor(self) -> fx.Node:
        if self.given.mask is None:
            raise ValueError("the plan needs a dense tensor, and the site has none")
        return self.given.mask

    def _as_four(self, x: fx.Node) -> fx.Node:
        """Return x with all four axes."""
        missing = 4 - self.emitter.value(x).dim()

        def make() -> fx.Node:
            return reduce(lambda y, _: self._call(torch.unsqueeze, y, 0), range(missing), x)

        return self._once("four axes", (x,), {}, make) if missing else x

    def _expanded(self, x: fx.Node, batch: Size, length: Size) -> fx.Node:
        """Expand x, whose axes may have size one, to (batch, length)."""
        return self._call(aten.expand.default, x, [batch, length])

    def _packed(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        x = x if self.emitter.value(x).dtype == dtype else self._call(torch.Tensor.to, x, dtype)
        return self._call(torch.Tensor.contiguous, x)

    # ---- indices and sizes ----------------------------------------------------------------------------------------

    def _names(self, indices: Mapping[str, fx.Node], used: Iterable[Expr], loads: Mapping[str, fx.Node]) -> Names:
        """Return the values of the names in expressions. b is made only if they mention it, along the first axis of two."""
        used = tuple(used)
        found = dict(indices)
        if "b" not in found and any(ix.mentions(x, B) for x in used):
            found["b"] = self._along(self._batch, 1)
        sizes = {SEQLEN_Q.name: self.seqlen_q, SEQLEN_KV.name: self.seqlen_kv}
        sizes |= sizes_in(self.emitter, self.given, used)
        learned = torch.ops.attn_compiler.gathered.default if self.spec.needs_grad else aten.index.Tensor
        return Names(device=self._device, indices=found, sizes=sizes, tensors=loads, learned=learned)

    def _along(self, size: Size, following: int) -> fx.Node:
        """Return int64 0, 1, … up to a size, with axes of size one after it."""
        indices = self._call(torch.arange, size, device=self._device)
        for _ in range(following):
            indices = self._call(torch.unsqueeze, indices, -1)
        return indices

    def _number(self, function: Callable[..., Any], a: Size, b: Size) -> Size:
        if isinstance(a, int) and isinstance(b, int):
            return int(function(a, b))
        return self._call(function, a, b)

    @property
    def _device(self) -> torch.device:
        return self.emitter.value(self.given.q).device

    @property
    def _batch(self) -> Size:
        return self._dim(self.given.q, 0, self.spec.batch)

    @property
    def _heads(self) -> Size:
        return self._dim(self.given.q, 1, self.spec.num_heads_q)

    @property
    def seqlen_q(self) -> Size:
        return self._dim(self.given.q, 2, self.spec.seqlen_q)

    @property
    def seqlen_kv(self) -> Size:
        return self._dim(self.given.k, 2, self.spec.seqlen_kv)

    def _dim(self, node: fx.Node, axis: int, dim: Dim) -> Size:
        """Return one node for equal sizes, so that all layers share the nodes made from it."""
        size = self.emitter.value(node).shape[axis]
        if isinstance(size, int):
            return size
        return self.emitter.once(("triton size", dim), lambda: self._call(aten.sym_size.int, node, axis))

    def _once(
        self,
        name: str,
        made_from: tuple[Expr | fx.Node, ...],
        loads: Mapping[str, fx.Node],
        make: Callable[[], fx.Node],
    ) -> fx.Node:
        """Return one node for equal expressions, the same tensors and the same sizes."""
        names = {name for x in made_from if not isinstance(x, fx.Node) for name in reads.names_in(x)}
        tensors = sorted((own, node) for own, node in loads.items() if own in names)
        sizes = (self.spec.batch, self.spec.num_heads_q, self.spec.seqlen_q, self.spec.seqlen_kv, self._device)
        return self.emitter.once((f"triton {name}", made_from, tuple(tensors), sizes), make)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.emitter.call(function, *args, **kwargs)
