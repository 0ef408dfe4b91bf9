"""A small decoder in layers on a mesh of two dimensions, against one process with whole sequences. To be run on every rank of a group."""

from __future__ import annotations

import unittest.mock
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import attn_compiler
from attn_compiler import ContextParallel
from attn_compiler.context_parallel import collectives as torch_collectives
from attn_compiler.passes.context_parallel import choosing
from attn_compiler.passes.context_parallel.places import CannotShard
from attn_compiler.reporting import verifications as results
from tests import dtensor_kernels

LAYERS, WIDTH, HEAD_DIM, VOCABULARY, LENGTH = 2, 32, 8, 31, 25
#: the batches of data-parallel groups are not of one length
SHORTER = 2

#: who shares what besides the sequence
WAYS = (
    "alone",  # nobody
    "tp",  # heads, with local tensors in between
    "tp, cp last",  # the same, and the mesh the other way round
    "tp, DTensors",  # heads, and q, k and v are DTensors
    "tp and fsdp",  # heads, and parameters over the ranks of a sequence
    "fsdp over dp",  # parameters, over data parallelism
    "fsdp over all",  # parameters, over data parallelism and the ranks of a sequence
    "fsdp, replicas",  # parameters over the ranks of a sequence, and copies of them over data parallelism
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """way: one of WAYS. masked: right padding, from which each layer makes its mask; "model": the model makes it for all layers.
    checkpointed: use_reentrant, if each layer is in a checkpoint. compiled: "whole", "layers", or "checkpoints": each layer with what
    checkpoints it. ranks: how many there are."""

    way: str
    method: str = "all_gather"
    load_balance: str | None = "auto"
    masked: bool | str = False
    heads: tuple[int, int] = (4, 2)
    compiled: str = "whole"
    checkpointed: bool | None = None
    inner: str = "aot_eager"
    ranks: int = 4

    @property
    def name(self) -> str:
        words = [self.way, self.method, self.load_balance or "contiguous", self.compiled, self.inner]
        words += [] if self.ranks == 4 else [f"{self.ranks} ranks"]
        words += [f"padding by {self.masked}"] if self.masked else []
        words += [] if self.checkpointed is None else [f"reentrant {self.checkpointed}"]
        return " · ".join([*words, "{} and {} heads".format(*self.heads)])


@dataclass(frozen=True, kw_only=True)
class Result:
    """far: the largest difference from one process, of the loss and of each gradient, over the largest number. error: what was raised.
    verified: outputs of attentions that held on the first call. skipped: why others were not compared."""

    far: dict[str, float]
    masks: tuple[str, ...] = ()
    heads: tuple[int, ...] = ()
    sites: int = 0
    error: str | None = None
    verified: int = 0
    skipped: tuple[str, ...] = ()


class Layer(nn.Module):
    """made: q, k and v are taken apart by numbers of heads, as of whole tensors."""

    def __init__(self, heads: tuple[int, int], made: bool) -> None:
        super().__init__()
        of_q, of_k = heads
        self.heads, self.made = heads, made
        self.norm = nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, of_q * HEAD_DIM, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, of_k * HEAD_DIM, bias=False) for _ in range(2))
        self.out = nn.Linear(of_q * HEAD_DIM, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH, bias=False)

    def forward(self, x: Tensor, turn: Tensor, mask: Tensor | None) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            self.split(part(y), heads)
            for part, heads in zip((self.q, self.k, self.v), (self.heads[0], *self.heads[1:] * 2), strict=True)
        )
        if not self.made:
            q, k = q * turn[:, None], k * turn[:, None]
        pairs = causal(x, mask) if mask is not None and mask.dim() == 2 else mask
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=pairs, is_causal=pairs is None, enable_gqa=grouped)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        mixed: Tensor = self.down(torch.tanh(self.up(x)))
        return x + mixed

    def split(self, x: Tensor, heads: int) -> Tensor:
        # Under tensor parallelism a local tensor has fewer heads, and a DTensor all of them.
        return x.view(*x.shape[:2], heads if self.made else -1, HEAD_DIM).transpose(1, 2)


def causal(x: Tensor, keep: Tensor) -> Tensor:
    """Truth values for each query and key."""
    at = torch.arange(x.shape[1], device=x.device)
    return (at[None, :] <= at[:, None]) & keep.bool()[:, None, None, :]


class Decoder(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer(run.heads, run.way == "tp, DTensors") for _ in range(LAYERS))
        self.run = run
        self.through: Callable[..., Tensor] = self.checkpointed

    def forward(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.words(input_ids)
        turn = torch.cos(position_ids.to(x.dtype) / 10)[:, :, None].expand(-1, -1, HEAD_DIM).contiguous()
        mask = attention_mask
        if mask is not None and self.run.masked == "model":
            mask = causal(x, mask)
        for layer in self.layers:
            x = self.through(layer, x, turn, mask)
        scores: Tensor = self.head(x)
        return scores

    def checkpointed(self, layer: nn.Module, *given: Any) -> Tensor:
        if self.run.checkpointed is None:
            plain: Tensor = layer(*given)
            return plain
        found: Tensor = checkpoint(layer, *given, use_reentrant=self.run.checkpointed)
        return found


def measured(runs: list[Run]) -> list[Result]:
    """To be called on every rank."""
    dtensor_kernels.install()
    return [measured_once(run) for run in runs]


def failing_for_some_heads(run: Run) -> Result:
    """The rewrite fails on the ranks that have the second share of the heads."""
    dtensor_kernels.install()
    share = meshes(run.way).tp
    assert share is not None
    if share.get_local_rank() == 0:
        return measured_once(run)

    def fails(*_: Any) -> str:
        raise CannotShard("this rank has heads that it can take", "others")

    with unittest.mock.patch.object(choosing, "choice", fails):
        return measured_once(run)


def misplaced_for_some_heads(run: Run) -> Result:
    """On the ranks that have the second share of the heads, each takes itself for the first of the sequence when the graph runs."""
    dtensor_kernels.install()
    share = meshes(run.way).tp
    assert share is not None
    if share.get_local_rank() == 0:
        return measured_once(run)
    with unittest.mock.patch.object(torch_collectives, "rank_of", return_value=0):
        return measured_once(run)


def measured_once(run: Run) -> Result:
    """One step of training, or what was raised."""
    torch._dynamo.reset()
    attn_compiler.reset()
    results.forget()
    try:
        return _step(run)
    except (attn_compiler.reasons.errors.ContextParallelUnsupported, attn_compiler.VerificationMismatch) as error:
        return Result(far={}, error=str(error))


def build(run: Run) -> Decoder:
    """In float64, with the same numbers on every rank."""
    torch.manual_seed(0)
    return Decoder(run).double()


@dataclass(frozen=True, kw_only=True)
class Meshes:
    """cp: of those that share a sequence. tp: of those that share heads. shards: over which parameters are spread. all: whose tokens the
    mean is of."""

    cp: DeviceMesh
    tp: DeviceMesh | None = None
    shards: DeviceMesh | None = None
    all: DeviceMesh
    groups: int = 1
    group: int = 0


def meshes(way: str) -> Meshes:
    size = dist.get_world_size()
    if way == "alone":
        alone = init_device_mesh("cpu", (size,))
        return Meshes(cp=alone, all=alone)
    if way.startswith("tp"):
        names = ("tp", "cp") if way == "tp, cp last" else ("cp", "tp")
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=names)
        return Meshes(cp=mesh["cp"], tp=mesh["tp"], all=mesh["cp"], shards=mesh["cp"] if "fsdp" in way else None)
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "cp"))
    of_all = mesh["dp", "cp"]._flatten("dp_cp")
    shards = {"fsdp over dp": mesh["dp"], "fsdp over all": of_all, "fsdp, replicas": mesh}[way]
    return Meshes(cp=mesh["cp"], shards=shards, all=of_all, groups=2, group=mesh.get_local_rank("dp"))


def _step(run: Run) -> Result:
    found = meshes(run.way)
    exact = _of_one_process(run, found.groups)
    model, cp = build(run), ContextParallel(found.cp, method=run.method, load_balance=run.load_balance)  # type: ignore[arg-type]
    if found.tp is not None:
        parallelize_module(model, found.tp, _plan(use_local_output=run.way != "tp, DTensors"))
    if found.shards is not None:
        for part in (*model.layers, model):
            fully_shard(part, mesh=found.shards)
    _compile(run, model, cp)
    batch = batches(run, found.groups)[found.group]
    part = cp.shard(**batch)
    scores = model(part["input_ids"], part["position_ids"], part["attention_mask"] if run.masked else None)
    loss = ContextParallel(found.all).mean(*total(scores, part["shift_labels"]))
    loss.backward()
    numbers = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        numbers[name] = averaged(parameter.grad, found)
    found_sites = [site for report in attn_compiler.reports() for site in report.sites]
    checks = [one for one in attn_compiler.verifications() if one.subject == "output"]
    return Result(
        far={
            name: float((numbers[name] - x).abs().nan_to_num(torch.inf).max() / x.abs().max())
            for name, x in exact.items()
        },
        masks=tuple(site.spec.mask.words for site in found_sites),
        heads=tuple(int(site.spec.num_heads_q) for site in found_sites),
        sites=sum(len(site.modules) for site in found_sites),
        verified=sum(one.skipped is None for one in checks),
        skipped=tuple(one.skipped for one in checks if one.skipped is not None),
    )


def averaged(grad: Tensor, found: Meshes) -> Tensor:
    """The average over all ranks with other tokens, of which FSDP takes that over the ranks of its mesh."""
    whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
    is_done = found.shards is not None and dist.get_rank() in found.shards.mesh and _holds(found.shards, found.cp)
    if is_done:
        return whole
    whole = whole.clone()
    dist.all_reduce(whole, group=found.cp.get_group())
    return whole / found.cp.size()


def _holds(outer: DeviceMesh, inner: DeviceMesh) -> bool:
    return set(inner.mesh.flatten().tolist()) <= set(outer.mesh.flatten().tolist())


def _compile(run: Run, model: Decoder, cp: ContextParallel) -> None:
    options = {"context_parallel": cp, "inner": run.inner, "verify": True}
    if run.compiled == "whole":
        model.compile(backend="attn_compiler", options=options)
    elif run.compiled == "checkpoints":
        model.through = torch.compile(model.checkpointed, backend="attn_compiler", options=options, fullgraph=True)
    else:
        for layer in model.layers:
            layer.compile(backend="attn_compiler", options=options, fullgraph=True)


def _plan(*, use_local_output: bool) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {}
    for name in (f"layers.{i}." for i in range(LAYERS)):
        plan |= {name + part: ColwiseParallel(use_local_output=use_local_output) for part in "qkv"}
        plan |= {f"{name}up": ColwiseParallel(), f"{name}out": RowwiseParallel(), f"{name}down": RowwiseParallel()}
    return plan


def batches(run: Run, groups: int) -> list[dict[str, Tensor]]:
    """Whole sequences for each data-parallel group; none fits the ranks without padding."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for length in (LENGTH - i * SHORTER for i in range(groups)):
        ids = torch.randint(VOCABULARY, (2, length), generator=generator)
        keep = torch.arange(length) < torch.tensor([[length], [length - 7]])
        labels = ids.where(keep, -100) if run.masked else ids
        found.append({"input_ids": ids, "labels": labels, "attention_mask": keep.long()})
    return found


def total(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of losses, and how many tokens count."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum"), (targets != -100).sum()


def _of_one_process(run: Run, groups: int) -> dict[str, Tensor]:
    model = build(run)
    of_losses, counts = [], []
    for batch in batches(run, groups):
        ids = batch["input_ids"]
        positions = torch.arange(ids.shape[1]).expand(ids.shape)
        scores = model(ids, positions, batch["attention_mask"] if run.masked else None)
        loss, count = total(scores, F.pad(batch["labels"][:, 1:], (0, 1), value=-100))
        of_losses.append(loss)
        counts.append(count)
    loss = torch.stack(of_losses).sum() / torch.stack(counts).sum()
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}
