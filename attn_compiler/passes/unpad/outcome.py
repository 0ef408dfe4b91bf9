"""The outcome for a graph's padding: it was removed, or it stays for a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from attn_compiler.lowerings.base import UNTOUCHED
from attn_compiler.passes.graph.onward import Outcome
from attn_compiler.passes.graph.unit import Unit
from attn_compiler.passes.unpad.unpadding import Batch, PackedWork
from attn_compiler.reasons.decisions import Reason
from attn_compiler.reporting.facts import Steps, UnpadReport
from attn_compiler.torch_private import packed as torch_packed, tracing as torch_tracing


@dataclass(frozen=True, kw_only=True, eq=False)
class PaddingOutcome(Outcome):
    """The model's own graph may run, beside the packed one or alone."""

    reads_all: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptGraph(PaddingOutcome):
    """A graph that is as it was. module, source: of the op that is to blame, if one is. shares: rows were to share tokens."""

    reason: Reason
    shares: bool = False
    module: str | None = None
    source: str | None = None

    def row(self) -> UnpadReport:
        return UnpadReport(kept=self.reason, shares=self.shares, module=self.module, source=self.source)


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed(PaddingOutcome):
    """A graph that computes real tokens alone.

    facts: conditions on each call, in the order in which `before` tells them; if one fails, the original runs.
    zeroed: outputs that are 0 at padding.
    places: index of each of those outputs -> its axes of rows and positions.
    writes: the model's graph writes in place.
    dropout: random numbers are drawn for real tokens alone.
    before: tells which tokens are packed, and which facts hold.
    original: the model's own graph.
    padded: that graph as a unit, which gets kernels as any graph does. None if a pass failed on it.
    fakes: fake values of the model's own inputs.
    work: of a call.
    inputs: fake values of the packed graph's further inputs: the number of tokens, and those of `Batch`.
    mode, most: the fake mode of the graph, and the most tokens that there can be, if that is known.
    windows: of attentions in which rows share tokens; empty where they share nothing.
    not_shared: why rows share no tokens although they should.
    steps: filled while it runs.
    """

    facts: tuple[str, ...]
    zeroed: tuple[str, ...]
    places: Mapping[int, tuple[int, int]]
    writes: bool
    dropout: bool
    before: fx.GraphModule
    original: fx.GraphModule
    padded: Unit | None = None
    work: PackedWork
    fakes: tuple[Any, ...]
    inputs: tuple[Any, ...]
    mode: FakeTensorMode
    most: int | None
    windows: tuple[int | None, ...] = ()
    not_shared: Reason | None = None
    steps: Steps = field(default_factory=Steps)

    def further(self, number: int) -> tuple[Any, ...]:
        """Return `inputs` for another number of tokens."""
        return fake_inputs(self.mode, self.most, number, Batch(*self.inputs[1:]), len(self.windows))

    @property
    def beside(self) -> tuple[fx.GraphModule, ...]:
        return (self.original,) if self.padded is None else (self.original, self.padded.graph_module)

    def give_up(self) -> None:
        torch_packed.forget_guards(self.inputs)

    def row(self) -> UnpadReport:
        return UnpadReport(
            shares=bool(self.windows), zeroed=self.zeroed, facts=self.facts, notes=self._notes(), steps=self.steps
        )

    def _notes(self) -> tuple[str, ...]:
        found = []
        if self.not_shared is not None:
            found.append(f"prompts are not shared, since not: {self.not_shared.rule}: {self.not_shared.observed}")
        if self.dropout:
            found.append(
                "dropout draws for real tokens alone: its results are statistically equal to the model's, and not the same"
            )
        if not self.zeroed:
            found.append(
                "nothing visible changes" if self.windows else "nothing visible changes: no output has padding"
            )
        if self.padded is None:
            return (*found, "a batch that is not packed runs the model's own graph, with no kernel of ours")
        sites = self.padded.found.sites
        decided = Counter(UNTOUCHED if site.decision is None else site.decision.lowering for site in sites)
        names = ", ".join(f"{name} × {n}" for name, n in decided.items())
        how = "as the model has it" if self.windows else "with its padding"
        return (*found, f"a batch that is not packed runs {how}: {names}")


def fake_inputs(mode: FakeTensorMode, most: int | None, number: int, like: Batch, windows: int) -> tuple[Any, ...]:
    """Make fake values of the further inputs of a packed graph. number: of tokens, an unknown size. like: for all other sizes."""
    size = torch_packed.own_size(mode, hint=number, most=most)
    with torch_tracing.running_in(mode):
        positions = None if like.keys is None else like.keys.shape[0]
        rows, device = like.starts.shape[0] - 1, like.starts.device
        return size, *Batch.like(size, rows, device, positions=positions, windows=windows).inputs


# ---- zeros at padding in the padded graph, as in the packed one ------------------------------------------------------


def zero_padding(graph: fx.Graph, packed: Packed) -> None:
    """Set a graph's outputs to 0 where the packed graph's are. The graph has the model's inputs and outputs."""
    if not packed.places:
        return
    tokens = _tokens(graph, packed.before.graph)
    given, output = _given(packed.original.graph), graph.output_node()
    new = list(_given(graph))
    with graph.inserting_before(output):
        for place, (rows, positions) in packed.places.items():
            rank = given[place].meta["example_value"].dim()
            new[place] = _zeroed(graph, new[place], tokens, rows, positions, rank)
    whole: Any = output.args[0]
    output.args = (tuple(new) if isinstance(whole, (tuple, list)) else new[0],)


def _given(graph: fx.Graph) -> tuple[Any, ...]:
    given: Any = graph.output_node().args[0]
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def _tokens(graph: fx.Graph, told: fx.Graph) -> fx.Node:
    """Return bool (B, S): which tokens are packed. It is computed before anything that may write to the inputs."""
    inputs = list(graph.find_nodes(op="placeholder"))
    copies: dict[fx.Node, fx.Node] = dict(zip(told.find_nodes(op="placeholder"), inputs, strict=True))
    asked: fx.Node = _given(told)[0]
    above, waiting = {asked}, [asked]
    while waiting:
        found = set(waiting.pop().all_input_nodes) - above
        above |= found
        waiting.extend(found)
    with graph.inserting_after(inputs[-1]):
        last = graph.call_function(torch.tensor, (0,))
    with graph.inserting_before(last):
        for node in told.nodes:
            if node in above and node not in copies:
                copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.erase_node(last)
    return copies[asked]


def _zeroed(graph: fx.Graph, x: fx.Node, tokens: fx.Node, rows: int, positions: int, rank: int) -> fx.Node:
    mask = tokens
    if rows == positions:
        mask = graph.call_method("reshape", (mask, -1))
    elif rows > positions:
        mask = graph.call_method("transpose", (mask, 0, 1))
    for axis in range(rank):
        if axis not in (rows, positions):
            mask = graph.call_method("unsqueeze", (mask, axis))
    return graph.call_method("masked_fill", (x, graph.call_function(torch.logical_not, (mask,)), 0))
