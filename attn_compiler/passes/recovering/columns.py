"""Sources of the elements of k and v: runs of head dims, each of which holds elements of one tensor.

Elements are read as those of masks are (reading/), but only by rules that move elements: views, slices, pieces of a split, `cat`,
and writes in place, such as `k[..., :n].copy_(k_nope)` into a fresh tensor. So each element is traced to the one tensor that holds it,
at a version between two writes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Linear, Load, Test
from attn_compiler.passes.graph import axes, mutation, views
from attn_compiler.passes.graph.axes import Dim
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.passes.graph.site import Match, Operand
from attn_compiler.passes.recovering import reading
from attn_compiler.passes.recovering.reading import Reader, Unreadable, fake, in_place, inside, moving
from attn_compiler.passes.recovering.reading.core import At, ReadOp

aten = torch.ops.aten

BATCH, HEAD, KEY, HEAD_DIM = (Index(name) for name in "bhkd")

#: placeholder for an element of uninitialised memory
_UNWRITTEN = Const(float("nan"))


@dataclass(frozen=True, kw_only=True)
class ColumnRun:
    """A run of `size` head dims from `first` on. of: the tensor that holds them. at: indices over b, h, k and d; d counts in the run."""

    first: int
    size: int
    of: Version
    at: At


class Columns:
    """Reads the head dims of operands of one mirror."""

    def __init__(self, mirror: Mirror) -> None:
        self._reader = Reader(mirror, _RULES, inside.reached)

    def runs(self, match: Match, operand: Operand, head_dim: Dim) -> list[ColumnRun] | None:
        """Return the runs that make up the head dims of k or v, in order; None if they are unknown."""
        at, size = _at(match, operand, head_dim), axes.dim_size(head_dim)
        if at is None or not size.is_Integer:
            return None
        try:
            found = self._reader.read_at(self._reader.mirror.order(match.out), operand.root, at)
        except Unreadable:
            return None
        return self._split(found, int(size))

    def _split(self, x: Expr, size: int) -> list[ColumnRun] | None:
        borders = _borders(x, size)
        if borders is None:
            return None
        runs: list[ColumnRun] = []
        for first, end in itertools.pairwise(borders):
            inside_run = ix.substitute(x, HEAD_DIM, ix.add(HEAD_DIM, Const(first)))
            load = ix.decide(inside_run, {HEAD_DIM.name: Linear((), end - first - 1)})
            if not isinstance(load, Load):
                return None
            runs.append(ColumnRun(first=first, size=end - first, of=self._reader.tensors[load.tensor], at=load.at))
        return runs


def _borders(x: Expr, size: int) -> list[int] | None:
    """Return the head dims at which a choice may change, 0 and the end included; None if one depends on anything else."""
    found = {0, size}
    for part in ix.ordered(x, _conditions):
        if not isinstance(part, Test):
            continue
        ((term, factor),) = part.form.terms if len(part.form.terms) == 1 else ((None, 0),)
        if term != HEAD_DIM or factor not in (1, -1) or part.relation != ">=":
            return None
        found.add(-part.form.const if factor == 1 else part.form.const + 1)
    return sorted(border for border in found if 0 <= border <= size)


def _conditions(x: Expr) -> tuple[Expr, ...]:
    """Return the parts of x, but not the indices of a load."""
    return () if isinstance(x, Load) else ix.parts(x)


def _at(match: Match, operand: Operand, head_dim: Dim) -> At | None:
    """Return the indices of element (b, h, k, d) in the operand's root; None if a dimension is only a part of one of these axes."""
    site_of = {own: site for site, own in operand.reads.items()}
    found = []
    for dim in operand.root_dims:
        atoms = [site_of.get(atom) for atom in axes.resolve(dim) if atom.size != axes.ONE]
        position: Expr | None = ix.ZERO
        while atoms and position is not None:
            position = _with_next(position, atoms, match, head_dim)
        if position is None:
            return None
        found.append(position)
    return tuple(found)


def _with_next(position: Expr, atoms: list[Any], match: Match, head_dim: Dim) -> Expr | None:
    """Extend a row-major position by the next axis, and remove its atoms from the list; None if no axis matches."""
    groups = ((BATCH, match.axes.batch), (HEAD, match.axes.heads_kv), (KEY, match.axes.key), (HEAD_DIM, head_dim))
    for index, group in groups:
        own = [atom for atom in axes.resolve(group) if atom.size != axes.ONE]
        size = reading.size(axes.dim_size(group))
        if own and atoms[: len(own)] == own and size is not None:
            del atoms[: len(own)]
            return ix.add(ix.mul(position, size), index)
    return None


def _joined(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """Read a cat of parts of a head. A cat of keys, such as a cache's and new ones, is itself a source."""
    dim = views.argument(node, "dim", 0)
    if not isinstance(dim, int) or not at[dim].facts.indices <= {HEAD_DIM.name}:
        return None
    return moving.READERS[aten.cat.default](reader, node, at)


def _same(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """Read a copy if it keeps dtype and device."""
    source = views.source(node)
    alike = fake(source).dtype == fake(node).dtype and fake(source).device == fake(node).device
    return reader.read(source, at) if alike else None


_MADE_EMPTY = (aten.new_empty.default, aten.empty.memory_format, aten.empty_like.default)
_COPIES = (*views.COPIES, *views.CASTS, aten.to.device, aten.type_as.default)

#: ATen op -> rule that reads an element of its result. Ops that compute have none: elements are traced to their results.
_RULES: dict[object, ReadOp] = {
    **{op: rule for op, rule in moving.READERS.items() if op not in (aten.embedding.default, aten.index.Tensor)},
    **dict.fromkeys(_COPIES, _same),
    **dict.fromkeys(_MADE_EMPTY, lambda *_: _UNWRITTEN),
    **dict.fromkeys((aten.cat.default, aten.concat.default, aten.concatenate.default), _joined),
    aten.copy_.default: in_place.READERS[aten.copy_.default],
}


def made_by(mirror: Mirror, version: Version) -> fx.Node | None:
    """The Dynamo node whose result the tensor is, if nothing wrote to it since."""
    is_as_made = version.since is None or mirror.order(version.since) < mirror.order(version.node)
    return mirror.owner(version.node) if is_as_made and not mutation.writes(version.node) else None
