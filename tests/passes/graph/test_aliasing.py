"""Which storages are reached from outside of a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from attn_compiler.passes.graph.aliasing import Aliases, memory_of
from tests.passes.compiling import captured

Tensor = torch.Tensor


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        made = x * self.weight
        y.add_(1)
        seen = y.data
        return made.view(-1), made.exp() + seen


def _named(graph: fx.Graph) -> dict[str, Any]:
    return {node.name: node for node in graph.nodes}


def test_what_goes_in_and_out_and_who_writes() -> None:
    gm, _ = captured(_Model(), torch.randn(3), torch.randn(3))
    aliases, nodes = Aliases(graph=gm.graph), _named(gm.graph)
    x, y, weight = (next(node for name, node in nodes.items() if part in name) for part in ("l_x_", "l_y_", "weight"))
    made = next(node for name, node in nodes.items() if name.startswith("made"))
    assert memory_of(made) <= aliases.returned
    assert not memory_of(x) & aliases.returned
    assert memory_of(x) | memory_of(y) | memory_of(weight) == aliases.given
    assert aliases.parameters == memory_of(weight)
    assert aliases.written == memory_of(y)
    assert aliases.taken_as_data == memory_of(y)
    assert memory_of(None) == set()


def test_it_is_of_the_graph_as_it_was_when_it_was_first_asked() -> None:
    gm, _ = captured(lambda x: x.exp(), torch.randn(3))
    aliases = Aliases(graph=gm.graph)
    before = aliases.returned
    output = gm.graph.output_node()
    output.args = ((gm.graph.find_nodes(op="placeholder")[0],),)
    assert aliases.returned is before
