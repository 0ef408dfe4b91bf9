"""Models of models.py on several ranks, each with its part of the sequence, against one process with all of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import attn_compiler
from attn_compiler import ContextParallel
from tests.context_parallel import models
from tests.distributed import processes

LENGTH = 32


@dataclass(frozen=True, kw_only=True)
class Run:
    """One model on all ranks. options: of torch.compile, besides the one in question."""

    case: str
    method: str
    load_balance: str | None
    inner: str = "eager"

    @property
    def name(self) -> str:
        return f"{self.case} · {self.method} · {self.load_balance or 'contiguous'} · {self.inner}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """error: the largest difference of an output that counts. gradient_error: the largest of a parameter, over the largest gradient.
    masks, notes: of all sites."""

    error: float
    gradient_error: float
    masks: tuple[str, ...]
    notes: tuple[str, ...]
    sites: int


def results(runs: list[Run], size: int) -> dict[str, list[Result]]:
    """Of runs by name, of each of so many ranks."""
    found = processes.run_each(measured, runs, size=size)
    return dict(zip((run.name for run in runs), found, strict=True))


def measured(runs: list[Run]) -> list[Result]:
    """To be called on every rank of a group."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [_measured(mesh, run) for run in runs]


def _measured(mesh: Any, run: Run) -> Result:
    torch._dynamo.reset()
    attn_compiler.reset()
    cp = ContextParallel(mesh, method=run.method, load_balance=run.load_balance)  # type: ignore[arg-type]
    case = models.EVERY[run.case]
    model, batch = models.build(case), models.batch(case, LENGTH)
    weight = torch.randn(batch["x"].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    if "mask" in batch:
        weight = weight * batch["mask"][..., None]
    expected = model(**batch)
    (expected * weight).sum().backward()
    wanted = _taken_gradients(model)
    own = torch.cat([torch.arange(LENGTH).chunk(_chunks(cp))[i] for i in _own(cp)])
    compiled = torch.compile(model, backend="attn_compiler", options={"context_parallel": cp, "inner": run.inner})
    out = compiled(**{name: x[:, own].contiguous() for name, x in batch.items()})
    (out * weight[:, own]).sum().backward()
    found = _taken_gradients(model)
    for name in wanted:
        dist.all_reduce(found.setdefault(name, torch.zeros_like(wanted[name])))
    largest = max(float(x.abs().max()) for x in wanted.values())
    sites = [site for report in attn_compiler.reports() for site in report.sites]
    return Result(
        error=float(((out - expected[:, own]) * (weight[:, own] != 0)).abs().max()),
        gradient_error=max(float((found[name] - x).abs().nan_to_num(torch.inf).max()) for name, x in wanted.items())
        / largest,
        masks=tuple(site.spec.mask.words for site in sites),
        notes=tuple(note for site in sites for note in site.notes),
        sites=sum(len(site.modules) for site in sites),
    )


def _chunks(cp: ContextParallel) -> int:
    return 2 * cp.size if cp.is_balanced else cp.size


def _own(cp: ContextParallel) -> tuple[int, ...]:
    """By the guide's words, not by the code that is tested."""
    return (cp.rank, 2 * cp.size - 1 - cp.rank) if cp.is_balanced else (cp.rank,)


def _taken_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def everything(size: int, cases: Mapping[str, models.Case]) -> list[Run]:
    """Every case by every method and order."""
    found = []
    for name, case in cases.items():
        for method in ("all_gather", "all_to_all"):
            if method == "all_gather" or case.heads_kv % size == 0:
                found += [Run(case=name, method=method, load_balance=order) for order in (None, "head_tail")]
    return found


def some(size: int, cases: Mapping[str, models.Case]) -> list[Run]:
    """Each case once, by methods and orders in turn."""
    found = []
    for at, name in enumerate(cases):
        own = [run for run in everything(size, cases) if run.case == name]
        found.append(own[at % len(own)])
    return found
