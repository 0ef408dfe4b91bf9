"""The graphs of a forward and of a backward that Inductor would get of attentions in a ring. The other ranks are not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_compiler
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.functional import scaled_dot_product_attention

import attn_compiler
from attn_compiler import ContextParallel
from attn_compiler.context_parallel import rank_sync
from attn_compiler.torch_private import inductor as torch_inductor
from tests.meshes import fake_mesh

HEADS, HEADS_KV, HEAD_DIM, WIDTH = 4, 2, 16, 48


class Model(nn.Module):
    """Causal attentions over x (B, S, WIDTH), one after the other."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = layers
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM)
        self.k, self.v = (nn.Linear(WIDTH, HEADS_KV * HEAD_DIM) for _ in range(2))
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.layers):
            q, k, v = (f(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for f in (self.q, self.k, self.v))
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + self.out(out.transpose(1, 2).flatten(2))
        return x


def graphs(
    monkeypatch: pytest.MonkeyPatch,
    *,
    size: int,
    length: int,
    layers: int = 1,
    lowering: str = "triton",
    load_balance: Any = None,
    method: str = "ring",
) -> tuple[list[fx.Graph], str]:
    """What Inductor would get, forward first, and the name of the group."""
    found: list[fx.Graph] = []
    group = ""

    def compile_with_inductor(
        gm: fx.GraphModule, inputs: Sequence[Any], *, joint_pass: Any, last_pass: Any, **_: Any
    ) -> Callable[..., Any]:
        def compiler(graph_module: fx.GraphModule, _: Any) -> Callable[..., Any]:
            last_pass(graph_module.graph)
            graph_module.graph.lint()
            graph_module.recompile()
            found.append(graph_module.graph)
            return graph_module.forward

        def parted(joint: fx.GraphModule, given: Any, **more: Any) -> Any:
            joint_pass(joint.graph)
            return min_cut_rematerialization_partition(joint, given, **more)

        boxed = make_boxed_compiler(compiler)
        return aot_autograd(fw_compiler=boxed, bw_compiler=boxed, partition_fn=parted)(gm, list(inputs))

    monkeypatch.setattr(torch_inductor, "compile_with_inductor", compile_with_inductor)
    monkeypatch.setattr(rank_sync, "agree", lambda *_, **__: None)
    torch._dynamo.reset()
    attn_compiler.reset()
    with fake_mesh(size) as mesh:
        cp = ContextParallel(mesh, method=method, load_balance=load_balance)  # type: ignore[arg-type]
        group = cp.group_name
        options = {"context_parallel": cp, "lowerings": [lowering], "strict": True}
        model = torch.compile(Model(layers), backend="attn_compiler", options=options)
        model(torch.randn(1, length, WIDTH, requires_grad=True)).sum().backward()
    return found, group
