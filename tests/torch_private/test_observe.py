"""What is private to PyTorch in watching a compilation: real counters, a real trace, real cache entries."""

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
from torch import nn
from torch._dynamo.utils import counters

from attn_compiler.torch_private import observe as torch_observe

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
