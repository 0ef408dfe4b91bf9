"""A small Llama under tensor parallelism, in the forms that people write it: run in each process of a group (processes.py)."""

from __future__ import annotations

import copy
import dataclasses
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

import attn_compiler
from attn_compiler.reporting.report import Report
from tests.distributed.processes import SIZE

LAYERS, HEADS, HEADS_KV, SEQLEN = 2, 4, 2, 32
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """way: who parallelises the model, and how. impl: the model's attention. padded: the first sequence ends in padding.

    inner: AOTAutograd takes DTensors apart, and seconds for it; without it they are what the rewritten graph computes with.
    """

    way: str
    impl: str = "sdpa"
    padded: bool = False
    inner: str = "aot_eager"

    def __str__(self) -> str:
        return "-".join([self.way, self.impl, *(["padded"] if self.padded else [])])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """mine, eager: how far logits, loss and each gradient are from float64's, compiled and not, as shares of the largest number."""

    reports: list[Report]
    mine: dict[str, float]
    eager: dict[str, float]


def outcomes(cases: list[Case]) -> dict[str, Outcome]:
    return {str(case): _outcome(case) for case in cases}


def _outcome(case: Case) -> Outcome:
    torch.manual_seed(0)
    torch._dynamo.reset()
    attn_compiler.reset()
    plain = LlamaForCausalLM(config(case.impl))
    ids = torch.randint(0, 128, (2, SEQLEN))
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids, "use_cache": False}
    if case.padded:
        inputs["attention_mask"] = (torch.arange(SEQLEN) < torch.tensor([[23], [SEQLEN]])).long()
    exact = _numbers(copy.deepcopy(plain).double(), inputs)
    model = _parallel(case, plain)
    eager = _numbers(model, inputs)
    options = {"inner": case.inner, "strict": True}
    if case.way == "fsdp":
        for layer in model.model.layers:
            layer.compile(backend="attn_compiler", options=options)
    else:
        model.compile(backend="attn_compiler", options=options, fullgraph=True)
    mine = _numbers(model, inputs)
    return Outcome(reports=list(attn_compiler.reports()), mine=_far(mine, exact), eager=_far(eager, exact))


def config(impl: str) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS_KV,
        num_hidden_layers=LAYERS,
        intermediate_size=128,
        vocab_size=128,
        attn_implementation=impl,
    )


def _parallel(case: Case, plain: LlamaForCausalLM) -> nn.Module:
    if case.way == "auto":
        return _by_transformers(case, plain)
    if case.way == "fsdp":
        mesh = init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(plain, mesh["tp"], by_hand())
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])
    plan = along_the_sequence() if case.way == "sequence" else by_hand()
    return parallelize_module(plain, init_device_mesh("cpu", (SIZE,)), plan)


def by_hand() -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {}
    for name in (f"model.layers.{i}." for i in range(LAYERS)):
        plan |= {f"{name}self_attn.{part}": ColwiseParallel() for part in _PROJECTIONS}
        plan |= {f"{name}mlp.{part}": ColwiseParallel() for part in ("gate_proj", "up_proj")}
        plan |= {f"{name}self_attn.o_proj": RowwiseParallel(), f"{name}mlp.down_proj": RowwiseParallel()}
    return plan


def along_the_sequence() -> dict[str, ParallelStyle]:
    """The hidden states between the attentions and the MLPs are DTensors, sharded along the sequence."""
    shards: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False}
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **shards),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for name, style in by_hand().items():
        plan[name] = RowwiseParallel(**shards) if isinstance(style, RowwiseParallel) else style
    for name in (f"model.layers.{i}." for i in range(LAYERS)):
        whole: dict[str, Any] = {"hidden_states": Replicate()}
        plan |= {
            f"{name}input_layernorm": SequenceParallel(),
            f"{name}post_attention_layernorm": SequenceParallel(),
            f"{name}self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts=whole
            ),
            f"{name}mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        }
    return plan


def _by_transformers(case: Case, plain: LlamaForCausalLM) -> nn.Module:
    """What torchrun says of a process is read from its environment."""
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(SIZE), MASTER_ADDR="localhost", MASTER_PORT="0")
    with tempfile.TemporaryDirectory() as own:
        paths = [own]
        dist.broadcast_object_list(paths, 0)
        if rank == "0":
            plain.save_pretrained(paths[0])
        dist.barrier()
        model = LlamaForCausalLM.from_pretrained(paths[0], tp_plan="auto", attn_implementation=case.impl)
        dist.barrier()
        return model


def _numbers(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    out = model(**inputs)
    out.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        name: (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()
        for name, x in {"logits": out.logits, "loss": out.loss, **gradients}.items()
    }


def _far(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {
        name: float((found[name] - x).abs().nan_to_num(torch.inf).max() / x.abs().max()) for name, x in exact.items()
    }
