"""Storages of a graph that code outside of it can reach."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from attn_compiler.passes.graph import bodies, mutation
from attn_compiler.passes.graph.calls import target_name

Storages = set[StorageWeakRef]


@dataclass(kw_only=True, eq=False)
class Aliases:
    """Storages of a graph by who outside of it can reach them, found from the Dynamo nodes once a graph, before it is rewritten.

    returned: of the graph's results. given: of its inputs. parameters: of inputs that are parameters. writers: nodes that write, in order,
    with the storages that each writes to.
    """

    graph: fx.Graph

    @cached_property
    def returned(self) -> Storages:
        (output,) = self.graph.find_nodes(op="output")
        return set().union(*map(memory_of, output.all_input_nodes))

    @cached_property
    def inputs(self) -> list[Storages]:
        return [memory_of(node) for node in self.graph.find_nodes(op="placeholder")]

    @cached_property
    def given(self) -> Storages:
        return set().union(*self.inputs)

    @cached_property
    def parameters(self) -> Storages:
        inputs = self.graph.find_nodes(op="placeholder")
        return set().union(
            *(memory_of(n) for n in inputs if isinstance(n.meta.get("example_value"), torch.nn.Parameter))
        )

    @cached_property
    def writers(self) -> dict[fx.Node, Storages]:
        found = {node: bodies.writes(node) for node in self.graph.nodes}
        return {node: set().union(*map(memory_of, written)) for node, written in found.items() if written}

    @cached_property
    def written(self) -> Storages:
        return set().union(*self.writers.values())

    @cached_property
    def taken_as_data(self) -> Storages:
        """Return the storages of which the graph takes `.data`: autograd does not see writes through `.data`."""
        return set().union(*(memory_of(n) for n in self.graph.nodes if target_name(n) == "_get_data_attr"))


def memory_of(node: fx.Node | None) -> Storages:
    """Return the storages behind Dynamo's value of a node."""
    return set() if node is None else mutation.storages_of(node.meta.get("example_value"))
