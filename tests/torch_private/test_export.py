"""Exported programs by their private side: copies in the same names, and no guard after the export."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from attn_compiler.torch_private import export as torch_export, tracing as torch_tracing
from tests.export import models
from tests.export.models import batch, exported, kept, made


def _mode(program: ExportedProgram) -> FakeTensorMode:
    mode = torch_tracing.fake_mode_of_values(n.meta["val"] for n in program.graph.find_nodes(op="placeholder"))
    if mode is None:
        pytest.fail("an export has fake values")
    return mode


def _sizes(program: ExportedProgram) -> tuple[torch.SymInt, torch.SymInt]:
    value = program.graph.find_nodes(op="placeholder")[-1].meta["val"]
    return value.shape[0], value.shape[1]


def test_a_copy_keeps_names_like_those_of_builtins() -> None:
    program = exported(nn.Linear(4, 4), torch.ones(2, 4))
    names = [node.name for node in program.graph.nodes]
    assert "input" in names
    copied = torch_export.copied_graph(program)
    assert [node.name for node in copied.graph.nodes] == names
    made_again = torch_export.with_graph(program, copied, {})
    x = torch.ones(2, 4)
    assert torch.equal(made_again.module()(x), program.module()(x))


def test_numbers_are_the_constants_of_one_element() -> None:
    class Constants(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.tensor(0.5) + torch.tensor([1.0, 2.0])

    found = torch_export.numbers(exported(Constants(), torch.ones(3, 2)))
    assert [float(x) for x in found.values()] == [0.5]


@pytest.mark.parametrize("torch_raises", [True, False])
def test_a_new_guard_raises_and_is_not_kept(torch_raises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where PyTorch has no way of its own to say so."""
    if not torch_raises:
        monkeypatch.delattr(ShapeEnv, "error_on_new_guards", raising=False)
    program = exported(made(models.ByHand), batch(), kept(), dynamic=True)
    mode, (batches, length) = _mode(program), _sizes(program)
    env = mode.shape_env
    before = len(env.guards) if env is not None else -1
    with pytest.raises(RuntimeError), torch_export.without_new_guards(mode):
        bool(batches < length)
    assert env is not None
    assert len(env.guards) == before


def test_what_is_known_needs_no_guard() -> None:
    program = exported(made(models.CausalMask), batch(), dynamic=True)
    batches, _ = _sizes(program)
    with torch_export.without_new_guards(_mode(program)):
        assert bool(batches >= 2)
    with torch_export.without_new_guards(None):
        pass
