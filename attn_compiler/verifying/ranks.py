"""Verification on ranks that share a sequence: gathering of tensors, and exchange of findings.

`Layout` gives the positions of each rank, as `ContextParallel.positions` does for users. The checked nodes themselves are not used.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from attn_compiler.context_parallel import collectives as torch_collectives
from attn_compiler.context_parallel.layout import Layout
from attn_compiler.passes.graph.first_look import FirstLook
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.reasons.errors import VerificationMismatch, described
from attn_compiler.torch_private import rank_sync
from attn_compiler.verifying.values import Body, Key, NoValueError, Values

#: seconds to wait for a rank: it may still compile
_PATIENCE = 900.0


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """layout: of the sequence. rank: of this process. group: the name of their process group. beside: the groups that share heads with this
    rank. has_whole: each rank runs the model's own graph by itself."""

    layout: Layout
    rank: int
    group: str
    beside: tuple[str, ...] = ()
    has_whole: bool = False

    @staticmethod
    def from_look(look: FirstLook) -> Ranks:
        """Return the ranks that share a graph's sequence."""
        cp = look.cp
        layout = Layout(size=cp.size, balanced=cp.is_balanced)
        return Ranks(layout=layout, rank=cp.rank, group=cp.group_name, beside=look.beside, has_whole=look.has_whole)

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Return this rank's positions in the whole sequence. length: of its part."""
        return self.layout.positions(length, self.rank, device)

    def whole(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        """Gather the parts of all ranks, in the order of the sequence along the axis. Every rank has to call it."""
        by_rank = torch_collectives.parts(x, self.layout.size, self.group)
        length = x.shape[axis]
        shape = list(x.shape)
        shape[axis] = length * self.layout.size
        found = x.new_empty(shape)
        for rank, part in enumerate(by_rank):
            found.index_copy_(axis, self.layout.positions(length, rank, x.device), part)
        return found

    def meet(self, subject: str) -> None:
        """Wait for all ranks before a step of all of them. Raises RanksDisagree if one has failed."""
        rank_sync.agree(self.group, subject, f"at {subject}", seconds=_PATIENCE)

    def failed(self, error: Exception) -> None:
        """Tell the waiting ranks that this one will not come."""
        groups = self.beside if isinstance(error, rank_sync.RanksDisagree) else (self.group, *self.beside)
        for group in groups:
            rank_sync.send(group, f"failed: {described(error)}")

    def raise_first(self, found: Sequence[tuple[int, VerificationMismatch]]) -> None:
        """Raise on every rank the first mismatch of any rank, with a note that names the others. found: this rank's, each with the place of
        its check in the plan."""
        every = [_Found(place=place, rank=self.rank, fields=mismatch.fields()) for place, mismatch in found]
        for group in (self.group, *self.beside):
            every = _all_findings(group, every)
        if not every:
            return
        first, *others = sorted(every, key=lambda one: (one.place, one.rank))
        index = f"{first.fields['index']} on rank {first.rank}"
        mismatch = VerificationMismatch(**{**first.fields, "index": index, "until": "compile without context_parallel"})
        for one in others:
            fields = one.fields
            mismatch.add_note(f"also: the {fields['what']} at {fields['site']}, {fields['index']} on rank {one.rank}")
        raise mismatch


@dataclass(kw_only=True, eq=False)
class WholeLoads:
    """Loads of masks and biases for the whole sequence, computed by the model's own nodes from the inputs of all ranks. nodes: of the
    model's own graph, by name. axes: for each input with a part of the sequence, the axis of positions."""

    body: Body
    nodes: Mapping[str, fx.Node]
    axes: Mapping[str, int]
    _shared: dict[fx.Node, bool] = field(default_factory=dict)

    def value(self, version: Version, values: Values, ranks: Ranks) -> torch.Tensor:
        """Return the whole tensor. Every rank has to call it. Raises NoValueError."""
        node = self._node(version)
        if not self._is_shared(node):
            return values.at(version)
        known: dict[fx.Node, Any] = {}

        def made(one: fx.Node) -> Any:
            if one not in known:
                known[one] = found(one)
            return known[one]

        def found(one: fx.Node) -> Any:
            if self._is_shared(one) and one.name not in self.axes:
                return values.call(one, made)
            x = values.read(Key(self.body.index, one.name))
            is_part = one.name in self.axes and not values.is_rehearsal
            return ranks.whole(x, self.axes[one.name]) if is_part else x

        x = made(node)
        if not isinstance(x, torch.Tensor):
            raise NoValueError(f"{node.name} is no tensor")
        return x

    def _node(self, version: Version) -> fx.Node:
        dynamo = self.body.mirror.dynamo_node(version.node) if version.node.graph is self.body.mirror.graph else None
        if dynamo is None or dynamo.name not in self.nodes:
            raise NoValueError(f"{version.node.name} is not in the model's own graph")
        return self.nodes[dynamo.name]

    def _is_shared(self, node: fx.Node) -> bool:
        """Return True if a node depends on an input that ranks have parts of."""
        if node not in self._shared:
            self._shared[node] = node.name in self.axes or any(map(self._is_shared, node.all_input_nodes))
        return self._shared[node]


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A mismatch. place: of its check in the plan. rank: its finder, among those that share the sequence."""

    place: int
    rank: int
    fields: dict[str, str]


def _all_findings(group: str, found: list[_Found]) -> list[_Found]:
    """Return the findings of every rank of a group. Raises RanksDisagree if the check of one failed."""
    said = json.dumps([dataclasses.asdict(one) for one in found])
    by_rank = rank_sync.answers(group, "what was found", said, seconds=_PATIENCE)
    lost = [f"rank {rank}: {text}" for rank, text in enumerate(by_rank) if not text.startswith("[")]
    if lost:
        raise rank_sync.RanksDisagree("; ".join(lost))
    return [_Found(**fields) for text in by_rank for fields in json.loads(text)]
