"""Ranks that share a sequence, while they verify: what each has of a tensor, put together, and what each found, told to all.

What is in the sequence where is said by `Layout`, as `ContextParallel.positions` tells it to users, and not by the nodes that are checked.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attn_compiler import torch_collectives
from attn_compiler.context_parallel import ContextParallel
from attn_compiler.context_parallel.layout import Layout
from attn_compiler.errors import VerificationMismatch, described

#: seconds to wait for a rank: it may still compile
_PATIENCE = 900.0


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """layout: of the sequence. rank: of this process. group: the name of their process group."""

    layout: Layout
    rank: int
    group: str

    @staticmethod
    def of(cp: ContextParallel) -> Ranks:
        """The ranks of what a user gave."""
        return Ranks(layout=Layout(size=cp.size, balanced=cp.is_balanced), rank=cp.rank, group=cp.group_name)

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Where in the whole sequence this rank's positions are. length: of its part."""
        return self.layout.positions(length, self.rank, device)

    def whole(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        """The whole of what each rank has a part of, in the order of the sequence along the axis. Every rank has to call it."""
        by_rank = torch_collectives.parts(x, self.layout.size, self.group)
        length = x.shape[axis]
        shape = list(x.shape)
        shape[axis] = length * self.layout.size
        found = x.new_empty(shape)
        for rank, part in enumerate(by_rank):
            found.index_copy_(axis, self.layout.positions(length, rank, x.device), part)
        return found

    def meet(self, subject: str) -> None:
        """Wait for all ranks before something that all of them have to do. Raises RanksDisagree where one has failed."""
        torch_collectives.agree(self.group, subject, f"at {subject}", seconds=_PATIENCE)

    def failed(self, error: Exception) -> None:
        """Tell those that wait for this rank that it will not come."""
        if not isinstance(error, torch_collectives.RanksDisagree):
            torch_collectives.answers(self.group, "the check", f"failed: {described(error)}", seconds=_PATIENCE)

    def raise_first(self, found: Sequence[tuple[int, VerificationMismatch]]) -> None:
        """Raise on every rank the first mismatch that one of them found, with a note that names the others.

        found: this rank's, each with the place of its check in the plan.
        """
        said = json.dumps([[place, _fields(mismatch)] for place, mismatch in found])
        by_rank = torch_collectives.answers(self.group, "what was found", said, seconds=_PATIENCE)
        lost = [f"rank {rank}: {text}" for rank, text in enumerate(by_rank) if not text.startswith("[")]
        if lost:
            raise torch_collectives.RanksDisagree("; ".join(lost))
        every = [(place, rank, fields) for rank, text in enumerate(by_rank) for place, fields in json.loads(text)]
        if not every:
            return
        (_, first, fields), *others = sorted(every, key=lambda one: one[:2])
        fields |= {"index": f"{fields['index']} on rank {first}", "until": "compile without context_parallel"}
        mismatch = VerificationMismatch(**fields)
        for _, rank, other in others:
            mismatch.add_note(f"also: the {other['what']} at {other['site']}, {other['index']} on rank {rank}")
        raise mismatch


def _fields(mismatch: VerificationMismatch) -> dict[str, str]:
    return {field.name: getattr(mismatch, field.name) for field in dataclasses.fields(mismatch)}
