"""Which nodes the mirror of a unit looks into."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from attn_compiler.options.options import Options
from attn_compiler.passes.graph import mirroring, unit
from tests.passes.compiling import captured

Tensor = torch.Tensor
sdpa = F.scaled_dot_product_attention
S = 4
Q = (2, 4, S, 8)


def test_what_a_bodys_mask_is_made_of_is_not_skipped_in_the_caller() -> None:
    def function(q: Tensor, mask: Tensor) -> Tensor:
        shifted = mask + 1
        beside = (q * 2 + 1).exp()
        return checkpoint(lambda q, m, x: sdpa(q, q, q, attn_mask=m) + x, q, shifted > 0, beside, use_reentrant=False)

    gm, _ = captured(function, torch.randn(Q, requires_grad=True), torch.randn(S, S))
    (body,) = unit.units(gm, Options())
    made = mirroring.of(body.place.calls[0].unit, is_asked_for_all=False)
    targets = [node.target for node in made.graph.nodes]
    assert torch.ops.aten.add.Tensor in targets
    assert torch.ops.aten.exp.default not in targets


def test_nothing_is_skipped_for_those_who_ask_each_op() -> None:
    gm, _ = captured(lambda q: sdpa(q, q, q) + (q * 2).exp(), torch.randn(Q))
    (found,) = unit.units(gm, Options(unpad=True))
    assert mirroring.asks_for_all(found)
    (plain,) = unit.units(gm, Options())
    assert not mirroring.asks_for_all(plain)
    for one, is_there in ((found, True), (plain, False)):
        made = mirroring.of(one, is_asked_for_all=mirroring.asks_for_all(one))
        assert (torch.ops.aten.exp.default in {node.target for node in made.graph.nodes}) == is_there


class _Chooses(torch.nn.Module):
    """Gives back what depends on a parameter, or what does not, of dtypes and shapes that a mask may have."""

    def __init__(self, of_parameter: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(S, S), requires_grad=False)
        self.register_buffer("ones", torch.ones(S, S))
        self.of_parameter = of_parameter

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = x @ (self.weight if self.of_parameter else self.ones)
        return made.argmax(-1), made > 0, made


@pytest.mark.parametrize("of_parameter", [True, False])
def test_what_depends_on_a_parameter_is_no_mask_of_another_graph(of_parameter: bool) -> None:
    """Such a graph has no attention, so nothing of it is looked into."""
    gm, _ = captured(_Chooses(of_parameter), torch.randn(S, S))
    assert len(mirroring.handed_on(gm.graph)) == (0 if of_parameter else 3)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.arange(3), True),
        (torch.tensor(3), False),
        (torch.ones(4, 4, dtype=torch.bool), True),
        (torch.zeros(4, 4), True),
        (torch.zeros(4, 5), False),
        (torch.zeros(2, 1, 4, 5), True),
        (torch.zeros(2, 3, 4, 4), False),
        (torch.zeros(4, 4, requires_grad=True), False),
        ("mask", False),
    ],
    ids=str,
)
def test_what_may_be_of_a_mask(value: object, expected: bool) -> None:
    assert mirroring.may_be_of_mask(value) is expected
