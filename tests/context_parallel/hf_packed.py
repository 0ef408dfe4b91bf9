"""A small Llama of transformers whose rows hold several documents, on several ranks against one process in float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaForCausalLM

import attn_compiler
from attn_compiler import ContextParallel
from tests.context_parallel import layered
from tests.context_parallel.layered import Result
from tests.distributed import tensor_parallel


@dataclass(frozen=True, kw_only=True)
class Run:
    """documents: how long they are, of each row. compiled: "whole" or "layers". packed: whether ContextParallel is told."""

    documents: tuple[tuple[int, ...], ...] = ((7, 1, 10, 6), (13, 11))
    method: str = "all_gather"
    load_balance: str | None = "head_tail"
    compiled: str = "whole"
    checkpointed: bool = False
    packed: bool = True
    inner: str = "eager"

    @property
    def name(self) -> str:
        words = [str(self.documents), self.method, self.load_balance or "contiguous", self.compiled, self.inner]
        words += ["checkpointed"] if self.checkpointed else []
        return " · ".join([*words, *([] if self.packed else ["untold"])])


def measured(runs: list[Run]) -> list[Result]:
    """To be called on every rank."""
    return [_measured(run) for run in runs]


def _measured(run: Run) -> Result:
    torch._dynamo.reset()
    attn_compiler.reset()
    torch.manual_seed(0)
    model = LlamaForCausalLM(tensor_parallel.config("sdpa")).double().train()
    exact, one = copy.deepcopy(model), batch(run)
    scores = exact(input_ids=one["input_ids"], position_ids=one["position_ids"], use_cache=False).logits
    loss, count = layered.total(scores, one["shift_labels"])
    (loss / count).backward()
    wanted = {"loss": (loss / count).detach(), **{n: p.grad for n, p in exact.named_parameters() if p.grad is not None}}
    # Documents matter.
    ones = exact(input_ids=one["input_ids"], use_cache=False).logits
    assert float((ones - scores).abs().max()) > 1e-3
    try:
        found = _of_ranks(run, model, one)
    except attn_compiler.reasons.errors.AttnCompilerError as error:
        return Result(far={}, error=str(error))
    sites = [site for report in attn_compiler.reports() for site in report.sites]
    return Result(
        far={
            name: float((found[name] - x).abs().nan_to_num(torch.inf).max() / x.abs().max())
            for name, x in wanted.items()
        },
        masks=tuple(site.spec.mask.words for site in sites),
        sites=sum(len(site.modules) for site in sites),
    )


def _of_ranks(run: Run, model: Any, one: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options: Any = {"method": run.method, "load_balance": run.load_balance, "packed": run.packed}
    cp = ContextParallel(mesh, **options, replicated=() if run.packed else ("attention_mask",))
    if run.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for part in model.model.layers if run.compiled == "layers" else [model]:
        part.compile(backend="attn_compiler", options={"context_parallel": cp, "inner": run.inner}, fullgraph=True)
    mine = cp.shard(**one)
    targets = mine.pop("shift_labels")
    loss = cp.mean(*layered.total(model(**mine, use_cache=False).logits, targets))
    loss.backward()
    numbers = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        total = parameter.grad.clone()
        dist.all_reduce(total)
        numbers[name] = total / cp.size
    return numbers


def batch(run: Run) -> dict[str, torch.Tensor]:
    """Whole rows."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in run.documents])
    ids = torch.randint(1, 128, positions.shape, generator=torch.Generator().manual_seed(1))
    following = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    starts = torch.nn.functional.pad(positions[:, 1:], (0, 1)) == 0
    return {"input_ids": ids, "position_ids": positions, "shift_labels": following.where(~starts, -100)}
