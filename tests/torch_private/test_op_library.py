"""The library of ops, exported programs and observers."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from attn_compiler.torch_private import (
    export as torch_export,
    observe as torch_observe,
    op_library,
    tracing as torch_tracing,
)
from tests.export import models
from tests.export.models import batch, exported, kept, made

OURS = torch.ops.attn_compiler


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten as a body, though PyTorch keeps the op."""
    monkeypatch.setattr(op_library, "BODIES", dict(op_library.BODIES))
    monkeypatch.setattr(op_library, "NOTING", dict(op_library.NOTING))


def test_a_body_is_imported_by_its_first_call() -> None:
    late = op_library.Late("attn_compiler.nowhere", "forward")
    with pytest.raises(ModuleNotFoundError):
        late(1)
    assert op_library.Late("operator", "add")(1, 2) == 3


@pytest.mark.usefixtures("registered")
def test_only_a_late_body_is_called_directly_and_only_one_that_notes_is_noted() -> None:
    schema = "(Tensor x) -> Tensor"
    bodies: dict[str, Any] = {
        "tried_noting": op_library.Late("torch", "neg", notes=True),
        "tried_late": op_library.Late("torch", "neg"),
        "tried_plain": torch.neg,
    }
    for name, body in bodies.items():
        op_library.define(name, schema, body, "CompositeExplicitAutograd")
        assert getattr(OURS, name)(torch.ones(2)).tolist() == [-1.0, -1.0]
    assert {name for name in bodies if name in op_library.BODIES} == {"tried_noting", "tried_late"}
    found = {name: op_library.launching_body(getattr(OURS, name).default) for name in bodies}
    assert found == {"tried_noting": bodies["tried_noting"], "tried_late": None, "tried_plain": None}


def test_what_is_no_op_of_ours_has_no_body() -> None:
    assert op_library.launching_body(torch.ops.aten.add.Tensor) is None
    assert op_library.launching_body(len) is None


@pytest.mark.usefixtures("registered")
def test_a_helper_is_registered_once_and_runs_on_fakes() -> None:
    for factor in (2, 3):

        def times(x: torch.Tensor, factor: int = factor) -> torch.Tensor:
            return x * factor

        op_library.register_helper("tried_helper", "(Tensor x) -> Tensor", function=times, notes=True)
    assert OURS.tried_helper(torch.ones(2)).tolist() == [2.0, 2.0]
    assert OURS.tried_helper(torch.ones(2, 3, device="meta")).shape == (2, 3)
    body = op_library.launching_body(OURS.tried_helper.default)
    assert body is not None
    assert body(torch.ones(1)).item() == 2.0


@pytest.mark.usefixtures("registered")
def test_a_helper_may_have_a_gradient_of_its_own() -> None:
    def keep(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * x * 10

    op_library.register_helper(
        "tried_square", "(Tensor x) -> Tensor", function=torch.square, differentiated=(keep, backward)
    )
    x = torch.tensor([3.0], requires_grad=True)
    OURS.tried_square(x).backward(torch.tensor([1.0]))
    assert x.grad is not None
    assert x.grad.item() == 30.0


@pytest.mark.parametrize(("exact", "tag"), [(True, torch.Tag.needs_exact_strides), (False, torch.Tag.flexible_layout)])
@pytest.mark.usefixtures("registered")
def test_a_helper_says_which_strides_it_takes(exact: bool, tag: torch.Tag) -> None:
    name = f"tried_strides_{exact}".lower()
    op_library.register_helper(name, "(Tensor x) -> Tensor", function=torch.neg, exact_strides=exact)
    assert tag in getattr(OURS, name).default.tags


# Exported programs by their private side.
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


# What is private to PyTorch in watching a compilation.
TRACED = """
import torch
from attn_compiler.torch_private import compat as torch_compat, observe as torch_observe

def backend(gm, example_inputs):
    torch_compat.trace_artifact("attn_compiler_test", lambda: "the payload")
    print("traced", torch_observe.is_traced())
    return gm.forward

torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
"""


def test_counters_add_up() -> None:
    counters.pop("attn_compiler", None)
    torch_observe.add_to_counters({"sites": 2, "misses": 0})
    torch_observe.add_to_counters({"sites": 3})
    assert dict(counters.pop("attn_compiler")) == {"sites": 5, "misses": 0}


@pytest.mark.further
@pytest.mark.parametrize("traced", [False, True])
def test_is_traced_tells_whether_a_trace_is_written(tmp_path: Path, traced: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_TRACE"}
    if traced:
        environment["TORCH_TRACE"] = str(tmp_path)
    script = tmp_path / "traced.py"
    script.write_text(TRACED)
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == f"traced {traced}\n"
    artifacts = [
        json.loads(line.partition("] ")[2])["artifact"]["name"]
        for log in tmp_path.glob("*.log")
        for line in log.read_text().splitlines()
        if '"artifact"' in line
    ]
    assert ("attn_compiler_test" in artifacts) == traced


def _graphs_alive(model: Callable[..., Any], users_first: bool) -> int:
    """How many graphs that were compiled within nothing_left_behind are still in memory after it."""
    graphs: list[weakref.ref[Any]] = []

    def explaining(gm: Any, _: Any) -> Any:
        graphs.append(weakref.ref(gm))
        return gm.forward

    if users_first:
        torch.compile(model, backend="eager")(torch.ones(2, 4))
    with torch_observe.nothing_left_behind(explaining):
        torch_observe.compile_apart(model, explaining, None)(torch.ones(2, 4))
    assert graphs
    gc.collect()
    return sum(graph() is not None for graph in graphs)


@pytest.mark.parametrize("users_first", [False, True])
def test_nothing_left_behind_frees_its_graphs(users_first: bool) -> None:
    assert _graphs_alive(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), users_first) == 0


def test_original_of() -> None:
    model = nn.ReLU()
    assert torch_observe.original_of(torch.compile(model)) is model
    assert torch_observe.original_of(model) is model


def test_uncompiled_modules_come_back_compiled() -> None:
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    model[1].compile(backend="eager")
    implementation = model[1]._compiled_call_impl

    def failing() -> None:
        with torch_observe.uncompiled_modules(model):
            assert model[1]._compiled_call_impl is None
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert model[1]._compiled_call_impl is implementation
    assert model[0]._compiled_call_impl is None


def _breaks(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x + 1


def _plain_backend(gm: Any, _: Any) -> Any:
    return gm.forward


def test_breaks_of_the_backend_are_told_within_the_block_alone() -> None:
    told: list[torch_observe.Break] = []
    for backend in (_plain_backend, "eager"):
        torch._dynamo.reset()
        with torch_observe.breaks_told(_plain_backend, told.append):
            torch.compile(nn.Sequential(nn.ReLU()), backend=backend)(torch.ones(2))
            torch.compile(_breaks, backend=backend)(torch.ones(2))
        torch._dynamo.reset()
        torch.compile(_breaks, backend=_plain_backend)(torch.ones(2))
    (one,) = told
    assert [frame.line for frame in one.stack] == ["torch._dynamo.graph_break()"]
    assert one.reason.startswith("Call to `torch._dynamo.graph_break()`")
    assert one.modules == {}


def test_a_backend_is_watched_once_until_dynamo_is_reset() -> None:
    torch._dynamo.reset()
    told: list[torch_observe.Break] = []
    for _ in range(2):
        torch_observe.watch_breaks(_plain_backend, told.append)
    torch.compile(_breaks, backend=_plain_backend)(torch.ones(2))
    assert len(told) == 1
    torch._dynamo.reset()
    torch.compile(_breaks, backend=_plain_backend)(torch.ones(2))
    assert len(told) == 1
