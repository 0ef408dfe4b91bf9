"""Attention whose q, k and v are DTensors, in both processes of a group (processes.py), beside the same of whole tensors in one process."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import attn_compiler
from attn_compiler.reporting.report import Report
from tests import dtensor_kernels
from tests.distributed.processes import SIZE

BATCH, HEADS, SEQLEN, HEAD_DIM = 2, 4, 16, 8
WIDTH = HEADS * HEAD_DIM


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """name: of the function here that makes it. inner: what compiles the rewritten graph."""

    name: str
    inner: str = "aot_eager"

    def __str__(self) -> str:
        return f"{self.name}-{self.inner}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """far: of the output and of each gradient the distance from that of whole tensors in float64, as a share of the largest number.

    placements: of the same, where they are DTensors.
    """

    reports: list[Report]
    far: dict[str, float]
    placements: dict[str, str]


#: a function, and what it is called with: those with a gradient first whole, and the way to put each on the mesh
Made = tuple[Callable[..., Any], list[Tensor], list[Any]]


def outcomes(cases: list[Case]) -> dict[str, Outcome]:
    dtensor_kernels.install()
    return {str(case): _outcome(case) for case in cases}


def _outcome(case: Case) -> Outcome:
    torch.manual_seed(0)
    torch._dynamo.reset()
    attn_compiler.reset()
    mesh = init_device_mesh("cpu", (SIZE,))
    if case.name == "module":
        return _of_module(case, mesh)
    function, whole, placements = MAKERS[case.name]()
    exact = _numbers(function, [_leaf(x.double() if x.is_floating_point() else x) for x in whole])
    inputs = [_leaf(distribute_tensor(x, mesh, [p])) for x, p in zip(whole, placements, strict=True)]
    return _compared(_numbers(_compile(function, case), inputs), exact)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.is_floating_point())


def _compile(function: Callable[..., Any], case: Case) -> Callable[..., Any]:
    options = {"inner": case.inner, "strict": True, "lowerings": ["sdpa_cpu_flash", "math"]}
    return torch.compile(function, backend="attn_compiler", options=options, fullgraph=True)


def _numbers(function: Callable[..., Tensor], inputs: list[Tensor]) -> dict[str, Tensor]:
    out = function(*inputs)
    # Not the same for all heads: what is added up in the wrong process shows.
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    if isinstance(out, DTensor):
        weights = distribute_tensor(weights, out.device_mesh, out.placements)
    out.backward(weights)
    gradients = {f"gradient {i}": x.grad for i, x in enumerate(inputs) if x.grad is not None}
    return {"out": out.detach(), **gradients}


def _compared(mine: dict[str, Tensor], exact: dict[str, Tensor]) -> Outcome:
    far = {name: _far(mine[name], x) for name, x in exact.items()}
    placements = {name: str(x.placements) for name, x in mine.items() if isinstance(x, DTensor)}
    return Outcome(reports=list(attn_compiler.reports()), far=far, placements=placements)


def _far(found: Tensor, exact: Tensor) -> float:
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    return float((whole - exact).abs().max() / exact.abs().max())


# ---- functions of q, k and v ----------------------------------------------------------------------------------------


def _qkv(heads_kv: int = HEADS, head_dim_v: int = HEAD_DIM) -> list[Tensor]:
    sizes = ((HEADS, HEAD_DIM), (heads_kv, HEAD_DIM), (heads_kv, head_dim_v))
    return [torch.randn(BATCH, heads, SEQLEN, head_dim) for heads, head_dim in sizes]


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def _biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM), -1) @ v


MAKERS: dict[str, Callable[[], Made]] = {
    "heads": lambda: (_causal, _qkv(), [Shard(1)] * 3),
    "groups": lambda: (_causal, _qkv(heads_kv=2), [Shard(1)] * 3),
    "batch": lambda: (_causal, _qkv(), [Shard(0)] * 3),
    "whole": lambda: (_causal, _qkv(), [Replicate()] * 3),
    "written": lambda: (_written_out, _qkv(), [Shard(0)] * 3),
    "bias": lambda: (
        _biased,
        [*_qkv(head_dim_v=4), torch.randn(1, HEADS, SEQLEN, SEQLEN)],
        [*[Shard(0)] * 3, Replicate()],
    ),
}


# ---- a module under tensor parallelism -------------------------------------------------------------------------------


class Attention(nn.Module):
    """Its projections give DTensors, and its own code works on them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).view(BATCH, SEQLEN, HEADS, HEAD_DIM).transpose(1, 2) for part in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


def _of_module(case: Case, mesh: DeviceMesh) -> Outcome:
    plain, x = Attention(), torch.randn(BATCH, SEQLEN, WIDTH)
    exact = _of_weights(plain.double(), plain, x.double())
    plain.float()
    columns = ColwiseParallel(use_local_output=False)
    model = parallelize_module(plain, mesh, {"q": columns, "k": columns, "v": columns, "out": RowwiseParallel()})
    return _compared(_of_weights(_compile(model, case), model, x), exact)


def _of_weights(run: Callable[..., Tensor], model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    numbers = _numbers(run, [x])
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {**numbers, **gradients}
