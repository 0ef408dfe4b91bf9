"""A small attention that is compiled for two ranks in one process. What it computes there means nothing, what is refused does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention

import attn_compiler
from attn_compiler import ContextParallel
from attn_compiler.context_parallel import rank_sync
from attn_compiler.torch_private import inductor as torch_inductor
from tests.meshes import fake_mesh

#: positions of a rank, sequences, width, heads
LENGTH, BATCH, WIDTH, HEADS = 24, 2, 16, 2

Data = dict[str, torch.Tensor]
Before = Callable[["Model", torch.Tensor, Data], torch.Tensor]
Attend = Callable[["Model", torch.Tensor, torch.Tensor, torch.Tensor, Data], torch.Tensor]


class Model(nn.Module):
    """x (B, S, WIDTH) -> `before` -> attention -> `after`."""

    def __init__(self, before: Before | None, attend: Attend | None, after: Before | None) -> None:
        super().__init__()
        self.before, self.attend, self.after = before, attend, after
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.table = nn.Parameter(torch.randn(100, HEADS))
        self.embedding = nn.Embedding(100, WIDTH)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(self, x: torch.Tensor, **data: torch.Tensor) -> torch.Tensor:
        x = self.before(self, x, data) if self.before else x
        q, k, v = (self.split(f(x)) for f in (self.q, self.k, self.v))
        attend = self.attend or causal
        out = attend(self, q, k, v, data)
        x = out.transpose(1, 2).flatten(2)
        return self.after(self, x, data) if self.after else x


def causal(model: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Data) -> torch.Tensor:
    """What attends if nothing else is said."""
    return scaled_dot_product_attention(q, k, v, is_causal=True)


@contextmanager
def fresh_mesh() -> Iterator[DeviceMesh]:
    """Of two ranks, for a compiler that knows nothing."""
    torch._dynamo.reset()
    attn_compiler.reset()
    with fake_mesh(2) as mesh:
        yield mesh


def compile_and_run(
    *,
    before: Before | None = None,
    attend: Attend | None = None,
    after: Before | None = None,
    data: Data | None = None,
    length: int = LENGTH,
    said: list[str] | None = None,
    **description: Any,
) -> torch.Tensor:
    """One call of the compiled model. length: positions of the rank. said: filled with what it tells the other rank. description: of
    ContextParallel."""
    with fresh_mesh() as mesh, pytest.MonkeyPatch.context() as patch:
        # The other rank is not there.
        told = [] if said is None else said
        patch.setattr(rank_sync, "agree", lambda _, __, text, **___: told.append(text))
        options = {"context_parallel": ContextParallel(mesh, **description), "inner": "eager"}
        compiled = torch.compile(Model(before, attend, after), backend="attn_compiler", options=options)
        found: torch.Tensor = compiled(torch.randn(BATCH, length, WIDTH), **(data or {}))
        return found


def positions() -> torch.Tensor:
    return torch.arange(LENGTH).expand(BATCH, LENGTH).contiguous()


def kept_graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The graphs that the inner compiler will get."""
    graphs: list[fx.GraphModule] = []
    compiled = torch_inductor.compile_with_backend

    def kept(name: str, gm: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return compiled(name, gm, inputs)

    monkeypatch.setattr(torch_inductor, "compile_with_backend", kept)
    return graphs


def graph_of(**values: Any) -> fx.Graph:
    """A graph of inputs with these values of Dynamo's, by name."""
    graph = fx.Graph()
    for name, value in values.items():
        graph.placeholder(name).meta["example_value"] = value
    return graph
