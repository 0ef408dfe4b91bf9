"""Gradients of the first backward through one call: those that arrive at its outputs, and those that it sends to its inputs.

A call is a region of autograd's graph: from its outputs to the edges that its inputs had before it. Hooks on the outputs see the arriving
gradients. Hooks on the nodes with an edge to an input see this call's addition to that input's gradient, apart from other additions: the
same parameter in another graph, a residual around it. Both belong to the region alone and are freed with it, with all that they hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from attn_compiler.torch_private import compat as torch_compat


class Edge(NamedTuple):
    node: Node
    number: int

    @staticmethod
    def of(x: torch.Tensor) -> Edge:
        edge = torch.autograd.graph.get_gradient_edge(x)
        return Edge(edge.node, edge.output_nr)


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """outputs: gradients of the results, by place: the call's outputs, then its inputs as it left them. inputs: the addition to the
    gradient of each input, None for nothing; without inputs that the backward was not asked for. written: contents of the results at its
    beginning, if the caller had written to them."""

    outputs: Mapping[int, torch.Tensor]
    inputs: Mapping[int, torch.Tensor | None]
    written: Mapping[int, torch.Tensor] = field(default_factory=dict)


class CannotWatchError(Exception):
    """A call's gradients can't be told from those of others, with the reason. Internal: the check is skipped."""


def edges(args: Sequence[Any]) -> dict[int, Edge]:
    """Return the edge of each input's gradient. Has to be called before the call, which may write to an input."""
    return {i: Edge.of(x) for i, x in enumerate(args) if isinstance(x, torch.Tensor) and x.requires_grad}


def watch(
    outs: Sequence[Any], args: Sequence[Any], before: Mapping[int, Edge], done: Callable[[Arrived], None]
) -> list[Any]:
    """Call `done` once, at the end of the first backward through the call. Return the outputs to use instead of `outs`.

    Raises CannotWatchError. An output that another one depends on is returned as a view of itself: the tensor itself gets the gradients of
    both.
    """
    outs, inputs = list(outs), {edge: i for i, edge in before.items()}
    made = {i: Edge.of(x) for i, x in enumerate(outs) if isinstance(x, torch.Tensor) and x.grad_fn is not None}
    made = {i: edge for i, edge in made.items() if edge not in inputs}
    left = {len(outs) + i: Edge.of(args[i]) for i, edge in before.items() if Edge.of(args[i]) != edge}
    # Edges between nodes of the region, and its nodes with an edge to an input.
    inside, exits, seen = set[Edge](), dict[Node, dict[int, int]](), set[Node]()
    waiting = [edge.node for edge in (*made.values(), *left.values())]
    while waiting:
        node = waiting.pop()
        for place, edge in () if node in seen else _next(node):
            if edge in inputs:
                exits.setdefault(node, {})[place] = inputs[edge]
            else:
                inside.add(edge)
                waiting.append(edge.node)
        seen.add(node)
    if any(edge in inside for edge in left.values()):
        raise CannotWatchError("the graph reads an input that needs a gradient again, after it wrote to it")
    for i, edge in made.items():
        if edge in inside:
            outs[i] = outs[i].view_as(outs[i])
    watcher = _Watcher(done=done, wanted=tuple(before))
    try:
        # A tensor returned twice gets one hook.
        for i in {edge: i for i, edge in {**made, **left}.items()}.values():
            watcher.listen_to_output(i, outs[i] if i < len(outs) else args[i - len(outs)])
        for node, places in exits.items():
            watcher.listen_to_node(node, places)
    except Exception:
        watcher.stop()
        raise
    return outs


def _next(node: Node) -> Iterator[tuple[int, Edge]]:
    for place, (following, number) in enumerate(node.next_functions):
        if following is not None:
            yield place, Edge(following, number)


@dataclass(kw_only=True, eq=False)
class _Watcher:
    """wanted: the inputs that need a gradient. It refers to no tensor and no node of the call: those refer to it."""

    done: Callable[[Arrived], None]
    wanted: Sequence[int]
    _handles: list[Any] = field(default_factory=list)
    _run: int | None = None
    _outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    _inputs: dict[int, torch.Tensor | None] = field(default_factory=dict)
    _expected: Counter[int] = field(default_factory=Counter)
    _came: Counter[int] = field(default_factory=Counter)

    def listen_to_output(self, index: int, out: torch.Tensor) -> None:
        def arrived(gradient: torch.Tensor | None) -> None:
            # A node of several outputs runs the hooks of all of them.
            if gradient is not None and self._started():
                self._outputs[index] = gradient.detach().clone()

        self._handles.append(out.register_hook(arrived))  # type: ignore[no-untyped-call]

    def listen_to_node(self, node: Node, inputs: Mapping[int, int]) -> None:
        """inputs: place among the node's edges -> the input of that edge."""
        # A node in Python returns None without a gradient. One in C++ also for a gradient that was not asked for.
        says_all = isinstance(node, torch.autograd.function.BackwardCFunction)
        self._expected.update(inputs.values())

        def left(gradients: Sequence[torch.Tensor | None], _: Any) -> None:
            if not self._started():
                return
            for place, index in inputs.items():
                gradient, known = gradients[place], self._inputs.get(index)
                if gradient is not None:
                    self._inputs[index] = gradient.detach() if known is None else known + gradient.detach()
                self._came[index] += gradient is not None or says_all

        self._handles.append(node.register_hook(left))

    def _started(self) -> bool:
        """Note the current backward. A traced one does not count."""
        if torch.compiler.is_compiling():
            return False
        run = torch_compat.backward_run()
        if run != self._run:
            self._run = run
            self._forget()
            torch_compat.after_backward(self._finish)
        return True

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _finish(self) -> None:
        self.stop()
        asked = [index for index in self.wanted if self._came[index] == self._expected[index]]
        found = Arrived(outputs=dict(self._outputs), inputs={index: self._inputs.get(index) for index in asked})
        self._forget()
        self.done(found)

    def _forget(self) -> None:
        self._outputs.clear()
        self._inputs.clear()
        self._came.clear()
