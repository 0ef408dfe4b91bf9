"""A small Llama of transformers whose ranks share heads, parameters and sequences, against one process in float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from transformers import LlamaForCausalLM

import attn_compiler
from attn_compiler import ContextParallel
from tests.context_parallel import layered
from tests.context_parallel.layered import Meshes, Result
from tests.distributed import tensor_parallel

#: not a multiple of the chunks, so that ends are padded
LENGTH = 26


@dataclass(frozen=True, kw_only=True)
class Run:
    """way: "tp", "sp" (and along the sequence), or one of layered.WAYS. compiled: "whole" or "layers". padded: a row ends early.
    hides_padding: the model gets a mask of ones. checkpointed: use_reentrant of the model's own gradient checkpointing, if it is on.
    ranks: how many there are."""

    way: str
    compiled: str = "whole"
    padded: bool = False
    hides_padding: bool = False
    checkpointed: bool | None = None
    method: str = "auto"
    inner: str = "eager"
    ranks: int = 4

    @property
    def name(self) -> str:
        words = [self.way, self.compiled, self.method, self.inner, *(["padded"] if self.padded else [])]
        words += [] if self.ranks == 4 else [f"{self.ranks} ranks"]
        words += ["hidden padding"] if self.hides_padding else []
        return " · ".join([*words, *([] if self.checkpointed is None else [f"reentrant {self.checkpointed}"])])


def measured(runs: list[Run]) -> list[Result]:
    """To be called on every rank."""
    return [_measured(run) for run in runs]


def _measured(run: Run) -> Result:
    torch._dynamo.reset()
    attn_compiler.reset()
    try:
        return _step(run)
    except attn_compiler.reasons.errors.ContextParallelUnsupported as error:
        return Result(far={}, error=str(error))


def _step(run: Run) -> Result:
    found = layered.meshes("tp" if run.way == "sp" else run.way)
    torch.manual_seed(0)
    model = LlamaForCausalLM(tensor_parallel.config("sdpa")).train()
    exact = _of_one_process(copy.deepcopy(model).double(), found.groups, run)
    if run.checkpointed is not None:
        model.gradient_checkpointing_enable({"use_reentrant": run.checkpointed})
    _spread(model, run, found)
    cp = ContextParallel(found.cp, method=run.method)  # type: ignore[arg-type]
    options = {"context_parallel": cp, "inner": run.inner}
    for part in model.model.layers if run.compiled == "layers" else [model]:
        part.compile(backend="attn_compiler", options=options, fullgraph=True)
    part = cp.shard(**_batches(found.groups, run)[found.group])
    mask = torch.ones_like(part["input_ids"]) if run.hides_padding else part["attention_mask"]
    given = {"input_ids": part["input_ids"], "position_ids": part["position_ids"], "attention_mask": mask}
    scores = _whole(model(**given, use_cache=False).logits)
    loss = ContextParallel(found.all).mean(*layered.total(scores, part["shift_labels"]))
    loss.backward()
    numbers = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        numbers[name] = layered.averaged(parameter.grad, found)
    sites = [site for report in attn_compiler.reports() for site in report.sites]
    return Result(
        far={name: float((numbers[name] - x).norm() / x.norm()) for name, x in exact.items()},
        masks=tuple(site.spec.mask.words for site in sites),
        sites=sum(len(site.modules) for site in sites),
    )


def _spread(model: nn.Module, run: Run, found: Meshes) -> None:
    layers: Any = model.model.layers
    if found.tp is not None:
        plan = tensor_parallel.along_the_sequence() if run.way == "sp" else tensor_parallel.by_hand()
        parallelize_module(model, found.tp, plan)
    if found.shards is not None:
        for part in (*layers, model):
            fully_shard(part, mesh=found.shards)


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _batches(groups: int, run: Run) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    found = []
    for length in (LENGTH - i for i in range(groups)):
        ids = torch.randint(1, 128, (2, length), generator=generator)
        keep = torch.arange(length) < torch.tensor([[length], [length - (7 if run.padded else 0)]])
        found.append({"input_ids": ids, "labels": ids.where(keep, -100), "attention_mask": keep.long()})
    return found


def _of_one_process(model: nn.Module, groups: int, run: Run) -> dict[str, Tensor]:
    of_losses, counts = [], []
    for batch in _batches(groups, run):
        scores = model(batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        loss, count = layered.total(scores, F.pad(batch["labels"][:, 1:], (0, 1), value=-100))
        of_losses.append(loss)
        counts.append(count)
    mean = torch.stack(of_losses).sum() / torch.stack(counts).sum()
    mean.backward()
    dist.barrier()
    return {"loss": mean.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}
