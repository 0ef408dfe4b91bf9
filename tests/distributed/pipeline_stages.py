"""A small decoder in two pipeline stages, compiled in the forms that people write: run in each process of a group (processes.py)."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import attn_compiler
from attn_compiler.reporting.report import Report
from tests.distributed.processes import SIZE

LAYERS, DIM, HEADS, SEQLEN, MICROBATCHES = 2, 16, 2, 12, 2
OPTIONS = {"inner": "aot_eager", "strict": True, "lowerings": ["sdpa_cpu_flash"]}

#: who compiles what of a stage, and where its mask is made
WAYS = (
    "stages",  # each whole, with its mask in it
    "layers",  # one by one, and the mask by compiled code of the stage
    "layers, mask made outside",  # one by one, and the mask by code that is not compiled
    "mask sent",  # stages whole, the mask made by the first one and sent on
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """reports: of this process. mine, eager: what the last stage gives, and each gradient of this process's stage, by name."""

    reports: list[Report]
    mine: dict[str, Tensor]
    eager: dict[str, Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def made_mask(keep: Tensor) -> Tensor:
    causal = torch.ones(keep.shape[1], keep.shape[1], dtype=torch.bool).tril()
    return causal & keep[:, None, None, :]


class Stage(nn.Module):
    """Makes its mask of what the schedule gives every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.mask = made_mask

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        mask = self.mask(keep)
        for layer in self.layers:
            x = layer(x, mask)
        return x


class Sending(Stage):
    """The first stage makes the mask, as numbers to be added, and sends it on: pipelines send numbers."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.is_first = rank == 0

    def forward(self, x: Tensor, given: Tensor) -> Any:
        mask = torch.zeros(()).masked_fill(~made_mask(given), -torch.inf) if self.is_first else given
        for layer in self.layers:
            x = layer(x, mask)
        return (x, mask) if self.is_first else x


def outcomes() -> dict[str, Outcome]:
    return {way: _outcome(way) for way in WAYS}


def _outcome(way: str) -> Outcome:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    torch._dynamo.reset()
    attn_compiler.reset()
    plain = Sending(rank) if way == "mask sent" else Stage()
    stage = copy.deepcopy(plain)
    if way.startswith("layers"):
        for layer in stage.layers:
            layer.compile(backend="attn_compiler", options=OPTIONS)
        if way == "layers":
            stage.mask = torch.compile(made_mask, backend="attn_compiler", options=OPTIONS)
    else:
        stage.compile(backend="attn_compiler", options=OPTIONS, fullgraph=True)
    mine, eager = (_step(one, way) for one in (stage, plain))
    return Outcome(reports=list(attn_compiler.reports()), mine=mine, eager=eager)


def _step(module: Stage, way: str) -> dict[str, Tensor]:
    """A forward of all microbatches, and their backward where nothing but numbers with gradients is sent."""
    rank, trains = dist.get_rank(), way != "mask sent"
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(2 * MICROBATCHES, SEQLEN, DIM, generator=generator)
    keep = torch.arange(SEQLEN) < torch.tensor([[SEQLEN], [9], [SEQLEN - 1], [5]])
    stage = PipelineStage(module, rank, SIZE, torch.device("cpu"))
    loss = (lambda out, target: (out - target).square().sum()) if trains else None
    schedule = ScheduleGPipe(stage, n_microbatches=MICROBATCHES, loss_fn=loss)
    given: dict[str, Any] = {"keep": keep} if trains else {}
    first = (x,) if trains else (x, keep)
    target = {"target": torch.zeros_like(x)} if trains and rank == SIZE - 1 else {}
    with torch.set_grad_enabled(trains):
        out = schedule.step(*(first if rank == 0 else ()), **given, **target)
    found = {"out": out.detach()} if rank == SIZE - 1 else {}
    return found | {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
