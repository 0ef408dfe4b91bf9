"""The outcome for a graph's padding: it was removed, or it stays for a reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from attn_compiler.reasons.decisions import Reason
from attn_compiler.torch_private import packed as torch_packed, tracing as torch_tracing
from attn_compiler.torch_private.batches_before import Steps
from attn_compiler.torch_private.unpadding import Batch


@dataclass(frozen=True, kw_only=True)
class KeptGraph:
    """A graph that is as it was. module, source: of the op that is to blame, if one is."""

    reason: Reason
    module: str | None = None
    source: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """A graph that computes real tokens alone.

    facts: conditions on each call, in the order in which `before` tells them; if one fails, the original runs.
    zeroed: outputs that are 0 at padding.
    places: index of each of those outputs -> its axes of rows and positions.
    writes: the model's graph writes in place.
    dropout: random numbers are drawn for real tokens alone.
    before: tells which tokens are packed, and which facts hold.
    original: the model's own graph.
    fakes: fake values of the model's own inputs.
    inputs: fake values of the packed graph's further inputs: the number of tokens, and those of `Batch`.
    mode, most: the fake mode of the graph, and the most tokens that there can be, if that is known.
    steps: filled while it runs.
    """

    facts: tuple[str, ...]
    zeroed: tuple[str, ...]
    places: Mapping[int, tuple[int, int]]
    writes: bool
    dropout: bool
    before: fx.GraphModule
    original: fx.GraphModule
    fakes: tuple[Any, ...]
    inputs: tuple[Any, ...]
    mode: FakeTensorMode
    most: int | None
    steps: Steps = field(default_factory=Steps)

    def further(self, number: int) -> tuple[Any, ...]:
        """Return `inputs` for another number of tokens."""
        return fake_inputs(self.mode, self.most, number, self.inputs[-1])

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the notes for the report."""
        found = []
        if self.dropout:
            found.append(
                "dropout draws for real tokens alone: its results are statistically equal to the model's, and not the same"
            )
        if not self.zeroed:
            found.append("nothing visible changes: no output has padding")
        return tuple(found)


def fake_inputs(mode: FakeTensorMode, most: int | None, number: int, starts: torch.Tensor) -> tuple[Any, ...]:
    """Make fake values of the further inputs of a packed graph. number: of tokens, an unknown size. starts: like the last input."""
    size = torch_packed.own_size(mode, hint=number, most=most)
    with torch_tracing.running_in(mode):
        return size, *Batch.like(size, starts.shape[0] - 1, starts.device).inputs


Outcome = KeptGraph | Packed
