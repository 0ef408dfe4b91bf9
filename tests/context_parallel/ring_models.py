"""Models by rings, run in each process of a group: those of transformers, and small ones without gradients."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import attn_compiler
from attn_compiler import ContextParallel
from tests.context_parallel import hf_models, models
from tests.context_parallel.hf_models import Found

LENGTH = 32


@dataclass(frozen=True, kw_only=True)
class Inferred:
    """error: the largest difference of an output that counts. uses: of the logsumexps of all sites."""

    error: float
    uses: frozenset[str]


def of_transformers(names: list[str]) -> list[Found]:
    """To be called on every rank of a group. names: of hf_models.CASES."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [hf_models._measured(mesh, dataclasses.replace(hf_models.CASES[name], method="ring")) for name in names]


def without_gradients(name: str, inner: str) -> Inferred:
    """name: of models.CASES."""
    torch._dynamo.reset()
    attn_compiler.reset()
    cp = ContextParallel(init_device_mesh("cpu", (dist.get_world_size(),)), method="ring")
    case = models.CASES[name]
    model, batch = models.build(case), models.batch(case, LENGTH)
    own = cp.positions(LENGTH // cp.size)
    compiled = torch.compile(model, backend="attn_compiler", options={"context_parallel": cp, "inner": inner})
    with torch.no_grad():
        expected = model(**batch)[:, own]
        out = compiled(**{of: x[:, own].contiguous() for of, x in batch.items()})
    counts = batch["mask"][:, own][..., None] if "mask" in batch else torch.ones(())
    sites = [site for report in attn_compiler.reports() for site in report.sites]
    return Inferred(error=float(((out - expected) * counts).abs().max()), uses=frozenset(x.spec.lse for x in sites))
