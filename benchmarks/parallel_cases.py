"""Models that processes train together, and the ways to do it, for bench_parallel.py.

A way is a row in WAYS. Models are transformers' own, with the widths of real ones, four layers, and a vocabulary that is as much smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
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
from torch.nn.parallel import DistributedDataParallel

from benchmarks import inputs
from benchmarks.harness import BACKEND
from benchmarks.models import Size

#: labels that the loss leaves out
_NO_LABEL = -100
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_OUTPUTS = ("self_attn.o_proj", "mlp.down_proj")


# ---- models ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """norms: of a layer, between its attention and its MLP and around them."""

    config: str
    model: str
    norms: tuple[str, ...]
    sizes: Mapping[Size, Mapping[str, Any]]


def _sizes(hidden: int, inner: int, heads: int, heads_kv: int, head_dim: int, layers: int, **more: Any) -> Any:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": heads_kv,
        "head_dim": head_dim,
        "num_hidden_layers": layers,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "use_cache": False,
        "attn_implementation": "sdpa",
        **more,
    }


_FULL, _WINDOW = "full_attention", "sliding_attention"
MODELS: Mapping[str, Model] = {
    "llama": Model(
        config="LlamaConfig",
        model="LlamaForCausalLM",
        norms=("input_layernorm", "post_attention_layernorm"),
        sizes={
            "full": _sizes(2048, 8192, 32, 8, 64, 4, vocab_size=8192),
            "small": _sizes(256, 512, 4, 2, 64, 2, vocab_size=128),
        },
    ),
    "gemma3": Model(
        config="Gemma3TextConfig",
        model="Gemma3ForCausalLM",
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        sizes={
            "full": _sizes(
                2560, 10240, 8, 4, 256, 4, vocab_size=8192, sliding_window=1024, layer_types=[_WINDOW] * 3 + [_FULL]
            ),
            "small": _sizes(256, 512, 4, 2, 64, 2, vocab_size=128, sliding_window=8, layer_types=[_WINDOW, _FULL]),
        },
    ),
}
#: sequences and tokens of each, of one process
SHAPES: Mapping[Size, tuple[int, int]] = {"full": (4, 4096), "small": (2, 32)}


def build(name: str, size: Size, device: str) -> nn.Module:
    """The same weights in every process. In float32 on a CPU, else in bfloat16."""
    import transformers

    model = MODELS[name]
    arguments = {key: list(x) if isinstance(x, list) else x for key, x in model.sizes[size].items()}
    config = getattr(transformers, model.config)(**arguments)
    with torch.random.fork_rng(devices=[] if device == "cpu" else [device]), torch.device(device):
        torch.manual_seed(0)
        made: nn.Module = getattr(transformers, model.model)(config)
    return made.to(torch.float32 if device == "cpu" else torch.bfloat16).train()


def batch(name: str, size: Size, device: str, seed: int) -> dict[str, Tensor]:
    """Keyword arguments of a training step: sequences that end in padding, which has no labels."""
    count, length = SHAPES[size]
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, MODELS[name].sizes[size]["vocab_size"], (count, length), generator=generator)
    mask = inputs.padding_mask(count, length, left=False)
    labels = ids.masked_fill(mask == 0, _NO_LABEL)
    given = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {key: x.to(device) for key, x in given.items()}


# ---- ways -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Of one process: the model's name, its size, the group as a mesh, and where it computes."""

    name: str
    size: Size
    mesh: DeviceMesh
    device: str

    @property
    def layers(self) -> int:
        return int(MODELS[self.name].sizes[self.size]["num_hidden_layers"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """prepare: what a user does to the model. per_layer: then layers are compiled one by one. own_data: each process has its own batch.

    The attentions of layers that are compiled one by one, or between hooks that break the graph, share their code: is_shared.
    """

    prepare: Callable[[nn.Module, Context], nn.Module]
    per_layer: bool = False
    own_data: bool = False
    is_shared: bool = False


def _replicated(model: nn.Module, context: Context) -> nn.Module:
    """PyTorch's own buckets, of 25 MB, which a model of a dry run would not fill."""
    buckets: dict[str, Any] = {"bucket_cap_mb": 1} if context.size == "small" else {}
    devices = None if context.device == "cpu" else [torch.device(context.device)]
    return DistributedDataParallel(model, device_ids=devices, **buckets)


def _sharded(model: Any, context: Context) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, mesh=context.mesh)
    sharded: nn.Module = fully_shard(model, mesh=context.mesh)
    return sharded


def _tensor_parallel(model: nn.Module, context: Context) -> nn.Module:
    return parallelize_module(model, context.mesh, _plan(context))


def _sequence_parallel(model: nn.Module, context: Context) -> nn.Module:
    """What is between the attentions and the MLPs is sharded along the sequence."""
    shards: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False}
    whole: dict[str, Any] = {"hidden_states": Replicate()}
    plan = _plan(context) | {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **shards),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for layer in _layers(context):
        plan |= {f"{layer}.{part}": RowwiseParallel(**shards) for part in _OUTPUTS}
        plan |= {f"{layer}.{norm}": SequenceParallel() for norm in MODELS[context.name].norms}
        plan[f"{layer}.self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts=whole
        )
        plan[f"{layer}.mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    return parallelize_module(model, context.mesh, plan)


def _plan(context: Context) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {}
    for layer in _layers(context):
        plan |= {f"{layer}.{part}": ColwiseParallel() for part in _PROJECTIONS}
        plan |= {f"{layer}.{part}": RowwiseParallel() for part in _OUTPUTS}
    return plan


def _layers(context: Context) -> list[str]:
    return [f"model.layers.{i}" for i in range(context.layers)]


WAYS: Mapping[str, Way] = {
    "ddp": Way(prepare=_replicated, own_data=True),
    "fsdp_layers": Way(prepare=_sharded, per_layer=True, own_data=True, is_shared=True),
    "fsdp": Way(prepare=_sharded, own_data=True, is_shared=True),
    "tp": Way(prepare=_tensor_parallel),
    "tp_sequence": Way(prepare=_sequence_parallel),
}


def compile_in_place(model: Any, way: Way, backend: str, options: Mapping[str, Any] | None) -> None:
    """As docs/launchers.md says it for our backend, and in the same way for another."""
    how: dict[str, Any] = {"options": options and dict(options), "dynamic": False}
    if not way.per_layer:
        model.compile(backend=backend, **how)
    elif backend == BACKEND:
        from attn_compiler.integrations.transformers import compile_model

        compile_model(model, per_layer=True, **how)
    else:
        for layer in model.model.layers:
            layer.compile(backend=backend, **how)


# ---- numbers --------------------------------------------------------------------------------------------------------


def training_step(model: nn.Module, given: Mapping[str, Tensor]) -> Callable[[], Tensor]:
    """Forward, loss and backward; gives the loss. Gradients stay until the next."""

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss: Tensor = model(**given).loss
        loss.backward()
        return loss.detach()

    return step


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of all parameters, whole ones, by names without those of wrappers. A collective call."""
    return {
        name.removeprefix("module."): _whole(parameter.grad).float()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def _whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def largest_difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Of all gradients, the largest ‖found - wanted‖ / ‖wanted‖; infinite where one has other parameters."""
    if found.keys() != wanted.keys():
        return float("inf")
    return max(_relative(found[name], wanted[name]) for name in wanted)


def _relative(found: Tensor, wanted: Tensor) -> float:
    norm = float(wanted.norm())
    difference = float((found - wanted).norm())
    return difference / norm if norm else difference
