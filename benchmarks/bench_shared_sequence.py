"""GPUs share a sequence: attention and whole training steps with `context_parallel`, beside one GPU and PyTorch's own.

    python -m benchmarks.bench_shared_sequence --together 8
    python -m benchmarks.bench_shared_sequence --ranks 4 --forms model --lengths 65536 --append
    python -m benchmarks.bench_shared_sequence --tiny --output /tmp/shared.csv

A row is a form (py), a length and a method, over NCCL, a GPU a process. "torch ..." are PyTorch's `context_parallel`, uncompiled as people
call it, which has causal attention alone. The form "model" is a training step (forward, loss, backward) of a Llama of 8 layers with DDP;
"model checkpointed" checkpoints each layer, and has no GPU beside it that would hold all of it. "decode" is a step of that Llama with one
token for each of 8 rows, over a cache of that length (py). One GPU computes the whole ("whole") in turn with the ranks, in the same
processes. Attention is timed a few steps in a row. Times are medians of rounds, each of them the slowest rank's. `efficiency`: whole /
(ranks · shared). Differences are of this rank's part to one GPU's result, in the norm; the largest of all ranks. --tiny: a dry run on a CPU
over gloo. Exits with 1 where something failed or is wrong.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import attn_compiler
from attn_compiler.integrations.transformers_cache import ShardedCache
from benchmarks import bench_h200, harness, members
from benchmarks.harness import Bench, Row, Step, arg


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of one attention. window: keys that a query of the form "window" sees. document: tokens of each of the form "documents"."""

    heads: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    window: int = 1024
    document: int = 4096


FULL = Sizes()
SMALL = Sizes(heads=4, heads_kv=2, head_dim=16, window=8, document=12)

#: (q, k, v, documents (B, S), sizes) -> out. q, k, v: (B, H, S, D)
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Sizes], Tensor]


def _distance(q: Tensor) -> Tensor:
    """(S, S): how many positions a key is before a query."""
    at = torch.arange(q.shape[2], device=q.device)
    return at[:, None] - at[None, :]


def _causal(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, sizes: Sizes) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _window(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, sizes: Sizes) -> Tensor:
    back = _distance(q)
    allowed = (back >= 0) & (back < sizes.window)
    return scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)


def _documents(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, sizes: Sizes) -> Tensor:
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return scaled_dot_product_attention(q, k, v, attn_mask=same & (_distance(q) >= 0), enable_gqa=True)


FORMS: Mapping[str, Attend] = {"causal": _causal, "window": _window, "documents": _documents}


class Attention(nn.Module):
    """One attention of projected tensors."""

    def __init__(self, form: str, sizes: Sizes) -> None:
        super().__init__()
        self._attend, self._sizes = FORMS[form], sizes

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        """q: (B, S, heads · D); k, v: (B, S, heads_kv · D); documents: (B, S), which one each position is of -> (B, S, heads · D)"""
        split = (x.unflatten(-1, (-1, self._sizes.head_dim)).transpose(1, 2) for x in (q, k, v))
        return self._attend(*split, documents, self._sizes).transpose(1, 2).flatten(2)


def tensors(length: int, sizes: Sizes, device: str) -> dict[str, Tensor]:
    """q, k, v, a gradient and documents of one whole sequence, the same in every process. In float64 on a CPU, else in bfloat16."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    widths = {"q": sizes.heads, "k": sizes.heads_kv, "v": sizes.heads_kv, "grad": sizes.heads}
    made = {
        name: torch.randn(1, length, heads * sizes.head_dim, device=device, dtype=dtype, generator=generator)
        for name, heads in widths.items()
    }
    return made | {"documents": (torch.arange(length, device=device) // sizes.document)[None]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """rotation: how keys go round, in PyTorch's words. kernel: what SDPA calls."""

    rotation: str
    kernel: SDPBackend


PEERS: Mapping[str, Peer] = {
    f"torch {rotation} {kernel.name.split('_')[0].lower()}": Peer(rotation=rotation, kernel=kernel)
    for rotation in ("allgather", "alltoall")
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
}


@contextlib.contextmanager
def peer_parts(peer: Peer, mesh: DeviceMesh, given: Mapping[str, Tensor], sizes: Sizes) -> Iterator[list[Tensor]]:
    """q, k, v and the gradient as PyTorch's `context_parallel` cuts them: (1, heads, S / ranks, D), k and v for each head of q.

    Causal attention is what it has. Within, SDPA is the one that it patches.
    """
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(peer.rotation)
    group = sizes.heads // sizes.heads_kv
    whole: list[Tensor] = []
    for name, repeats in (("q", 1), ("k", group), ("v", group), ("grad", 1)):
        heads = given[name].unflatten(-1, (-1, sizes.head_dim)).transpose(1, 2)
        whole.append(heads.repeat_interleave(repeats, 1).contiguous())
    with sdpa_kernel(peer.kernel), context_parallel(mesh, buffers=whole, buffer_seq_dims=[2] * len(whole)):
        yield whole


def peer_step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by the SDPA that is in place now."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


#: Llama's proportions with fewer layers and a vocabulary that is as much smaller
_LLAMA: Mapping[Sizes, Mapping[str, int]] = {
    FULL: {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "vocab_size": 8192},
    SMALL: {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64},
}
#: query heads, heads of k and v
_HEADS = {FULL: (16, 4), SMALL: (4, 2)}


def llama(sizes: Sizes, length: int, device: str, *, checkpointed: bool) -> nn.Module:
    """The same weights in every process. In float32 on a CPU, else in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = dict(zip(("num_attention_heads", "num_key_value_heads"), _HEADS[sizes], strict=True))
    how = {"tie_word_embeddings": False, "use_cache": False, "attn_implementation": "sdpa"}
    config = LlamaConfig(**_LLAMA[sizes], **heads, head_dim=sizes.head_dim, max_position_embeddings=length, **how)
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = LlamaForCausalLM(config).to(torch.float32 if device == "cpu" else torch.bfloat16)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def tokens(sizes: Sizes, length: int, device: str) -> Tensor:
    """(1, length), the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(_LLAMA[sizes]["vocab_size"], (1, length), generator=generator).to(device)


BATCH = 8
#: positions that are not filled yet
_FREE = 8


def filled(model: nn.Module, length: int, device: str, cp: attn_compiler.ContextParallel | None, rank: int = 0) -> Any:
    """A cache with the same random keys and values on each rank. cp: ranks that share it; None: this one has all of it."""
    from transformers import StaticCache

    config: Any = model.config
    cache: Any = (
        StaticCache(config=config, max_cache_len=length)
        if cp is None
        else ShardedCache(config, cp, max_cache_len=length)
    )
    dtype = next(model.parameters()).dtype
    shape = (BATCH, config.num_key_value_heads, length, config.head_dim)
    draw = torch.Generator(device).manual_seed(1)
    for layer in cache.layers:
        new = torch.empty(*shape[:2], 1, shape[3], dtype=dtype, device=device)
        layer.lazy_initialization(new, new)
        for kept in (layer.keys, layer.values):
            all_of_it = torch.randn(shape, dtype=dtype, device=device, generator=draw)
            own = all_of_it if cp is None else all_of_it[:, :, rank :: cp.size]
            kept[:, :, : own.shape[2]].copy_(own)
    return cache


def stepper(model: Callable[..., Any], cache: Any, length: int, ids: Tensor) -> Callable[[], Tensor]:
    """One token for each row at the same position in each call; gives logits (B, 1, vocabulary)."""
    lengths: Sequence[Tensor] = [layer.cumulative_length for layer in cache.layers]

    def step() -> Tensor:
        with torch.no_grad():
            torch._foreach_zero_(lengths)
            torch._foreach_add_(lengths, length - _FREE)
            logits: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
            return logits

    return step


METHODS = ("all_gather", "all_to_all", "ring", "auto")
MODEL, CHECKPOINTED, DECODE = "model", "model checkpointed", "decode"
KEYS = ("form", "length", "method", "order", "overlap", "ranks")
TIMES = ("forward", "step")
COLUMNS = (
    *(*KEYS, "lowering", "note", "rounds"), *(f"{side}_{what}_ms" for side in ("whole", "shared") for what in TIMES),
    *(f"efficiency_{what}" for what in TIMES),
    *("output_difference", "gradient_difference", "memory_gb", "whole_memory_gb", "first_seconds", "numerics", "failure"),
)  # fmt: skip
IMPORTS = (*bench_h200.IMPORTS, "torch.distributed.tensor.experimental")
#: attentions that are timed as one: the host may run ahead of the GPU, as in a loop over batches. A model's step is long enough alone.
IN_A_ROW = 4
#: two computations of one attention or model in bfloat16 differ by so much
_NOISE = {"cpu": 1e-5, "cuda": 2e-2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A row to measure. dry: on a CPU, small, without Inductor. rounds: of timing, the same in each process."""

    form: str
    length: int
    method: str
    order: str
    rounds: int
    ranks: int = 2
    dry: bool = False

    @property
    def names(self) -> dict[str, str]:
        return {key: str(getattr(self, key, "")) for key in KEYS}

    @property
    def is_model(self) -> bool:
        return self.form in (MODEL, CHECKPOINTED)

    @property
    def sizes(self) -> Sizes:
        return SMALL if self.dry else FULL

    @property
    def how(self) -> dict[str, Any]:
        """As torch.compile takes it."""
        options = {"inner": "aot_eager"} if self.dry else {}
        return {"backend": harness.BACKEND, "dynamic": False, "options": options}

    def compiled(self, function: Any, further: Mapping[str, Any], **how: Any) -> Any:
        """With further options."""
        return torch.compile(function, **{**self.how, "options": self.how["options"] | further, **how})


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a process computes."""

    mesh: DeviceMesh
    device: str

    def context(self, job: Job) -> attn_compiler.ContextParallel:
        """How the ranks share a sequence."""
        balance: Any = None if job.order == "contiguous" else "head_tail"
        method: Any = job.method
        return attn_compiler.ContextParallel(self.mesh, method=method, load_balance=balance)


@dataclass(kw_only=True, slots=True)
class Prepared:
    """What is timed, and what is known before. parts: (of a shared result, the same of one GPU), outputs first, then gradients."""

    steps: dict[str, Step]
    row: dict[str, str]
    parts: list[tuple[Tensor, Tensor]]


def member(rank: int, folder: str, job: Job) -> None:
    """One process of a row: writes the row, or with how it failed. Ends with 1 then."""

    def row() -> dict[str, str]:
        with members.joined(rank, folder, job.ranks, dry=job.dry) as (mesh, device):
            return measure(job, Place(mesh=mesh, device=device), ready=lambda: members.wait_for_turn(rank, folder))

    members.write(rank, folder, row)


def measure(job: Job, place: Place, *, ready: Callable[[], None] = lambda: None) -> dict[str, str]:
    """The row, but for its names. Each process of the group calls it. ready: called once all is compiled, before anything is timed."""
    prepare = (
        _peer if job.method in PEERS else _model if job.is_model else _decode if job.form == DECODE else _attention
    )
    with prepare(job, place) as prepared:
        row = prepared.row | _differences(prepared.parts, place.device)
        prepared.parts.clear()
        harness.give_back(place.device)
        ready()
        row |= _times(prepared.steps, job.rounds, 1 if job.is_model else IN_A_ROW, place)
    return row


def _times(steps: Mapping[str, Step], rounds: int, in_a_row: int, place: Place) -> dict[str, str]:
    """Medians of rounds, each of the slowest rank. Ranks begin each measurement together."""
    begin_together = torch.zeros(1, device=place.device)
    found: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for at in range(rounds + 1):
        for name in order:
            dist.all_reduce(begin_together)
            together = harness.milliseconds(harness.several(steps[name], in_a_row), place.device)
            # The first round warms up.
            if at:
                found[name].append(together / in_a_row)
        order.reverse()
    gathered = _of_all(found)
    slowest = {
        name: statistics.median(max(times) for times in zip(*(one[name] for one in gathered), strict=True))
        for name in steps
    }
    row = {"rounds": str(rounds)} | {f"{name}_ms": f"{value:.4g}" for name, value in slowest.items()}
    for what in TIMES:
        if f"whole_{what}" in slowest and f"shared_{what}" in slowest:
            share = slowest[f"whole_{what}"] / dist.get_world_size() / slowest[f"shared_{what}"]
            row[f"efficiency_{what}"] = f"{share:.3f}"
    return row


def _of_all(own: Any) -> list[Any]:
    """What each rank has."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def _differences(parts: Sequence[tuple[Tensor, Tensor]], device: str) -> dict[str, str]:
    """The largest of all ranks, and whether they are within noise. parts: none where there is nothing beside."""
    if not parts:
        return {}
    own = [float((found - wanted).float().norm() / wanted.float().norm()) for found, wanted in parts]
    gathered = _of_all(own)
    largest = [max(values) for values in zip(*gathered, strict=True)]
    # A NaN is no number below the limit.
    right = all(value <= _NOISE[torch.device(device).type] for values in gathered for value in values)
    return {
        "output_difference": f"{largest[0]:.3g}",
        "gradient_difference": f"{max(largest[1:]):.3g}" if largest[1:] else "",
        "numerics": "ok" if right else "WRONG",
    }


@contextlib.contextmanager
def _attention(job: Job, place: Place) -> Iterator[Prepared]:
    given = tensors(job.length, job.sizes, place.device)
    grad = given.pop("grad")
    context = place.context(job)
    cut = _cut(place, job.order)
    part = cut.shard(**given, grad=grad)
    own_grad = part.pop("grad")
    steps: dict[str, Step] = {}
    results: dict[str, list[Tensor]] = {}
    row: dict[str, str] = {}
    for side, values, at_end, more in (
        ("whole", given, grad, {}),
        ("shared", part, own_grad, {"context_parallel": context}),
    ):
        seen = len(attn_compiler.reports())
        module = job.compiled(Attention(job.form, job.sizes), more, fullgraph=True)
        begin = time.perf_counter()
        made = _steps_of(module, values, at_end)
        results[side] = [x.clone() for x in made["first"]()]
        row["first_seconds"] = f"{time.perf_counter() - begin:.1f}"
        steps |= {f"{side}_{what}": made[what] for what in TIMES}
    whole = cut.shard(**dict(zip("oqkv", results["whole"], strict=True)), dims=dict.fromkeys("oqkv", 1))
    parts = list(zip(results["shared"], (whole[name] for name in "oqkv"), strict=True))
    yield Prepared(steps=steps, row=row | _found(seen), parts=parts)


def _steps_of(module: Callable[..., Tensor], values: Mapping[str, Tensor], grad: Tensor) -> dict[str, Any]:
    """forward, step (with its backward), and first: output and gradients of q, k and v."""
    leaves = {name: values[name].detach().requires_grad_() for name in "qkv"}
    given = {**values, **leaves}

    def forward() -> Tensor:
        with torch.no_grad():
            return module(**given)

    def step() -> Tensor:
        for leaf in leaves.values():
            leaf.grad = None
        out = module(**given)
        out.backward(grad)
        return out.detach()

    def first() -> list[Tensor]:
        forward()
        out = step()
        return [out, *(leaf.grad for leaf in leaves.values() if leaf.grad is not None)]

    return {"forward": forward, "step": step, "first": first}


@contextlib.contextmanager
def _peer(job: Job, place: Place) -> Iterator[Prepared]:
    """PyTorch's own context parallelism, which patches SDPA while it is timed."""
    given = tensors(job.length, job.sizes, place.device)
    wanted = _of_one_gpu(job, place, given)
    with peer_parts(PEERS[job.method], place.mesh, given, job.sizes) as (q, k, v, grad):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]

        def forward() -> Tensor:
            with torch.no_grad():
                return peer_step(*leaves)

        def step() -> Tensor:
            for leaf in leaves:
                leaf.grad = None
            out = peer_step(*leaves)
            out.backward(grad)
            return out.detach()

        found = [step(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
        parts = list(zip(found, wanted, strict=True))
        steps: dict[str, Step] = {"shared_forward": forward, "shared_step": step}
        yield Prepared(steps=steps, row={"lowering": job.method}, parts=parts)


def _of_one_gpu(job: Job, place: Place, given: Mapping[str, Tensor]) -> list[Tensor]:
    """This rank's part of the output and the gradients of one GPU, with k and v for each head of q."""
    group, width = job.sizes.heads // job.sizes.heads_kv, job.sizes.head_dim
    by_head = {name: given[name].unflatten(-1, (-1, width)).transpose(1, 2) for name in ("q", "k", "v", "grad")}
    repeats = {"q": 1, "k": group, "v": group}
    leaves = [by_head[name].repeat_interleave(repeats[name], 1).requires_grad_() for name in "qkv"]
    out = peer_step(*leaves)
    out.backward(by_head["grad"])
    named = dict(zip("oqkv", (out.detach(), *(leaf.grad for leaf in leaves)), strict=True))
    part = _cut(place, "head_tail").shard(**named, dims=dict.fromkeys("oqkv", 2))
    return [part[name] for name in "oqkv"]


def _cut(place: Place, order: str) -> attn_compiler.ContextParallel:
    """For tensors that are no inputs of a language model: nothing is added to them."""
    balance: Any = None if order == "contiguous" else "head_tail"
    added = ("position_ids", "attention_mask")
    return attn_compiler.ContextParallel(place.mesh, load_balance=balance, replicated=added)


@contextlib.contextmanager
def _model(job: Job, place: Place) -> Iterator[Prepared]:
    checkpointed = job.form == CHECKPOINTED
    ids = tokens(job.sizes, job.length, place.device)
    context = place.context(job)
    part = context.shard(input_ids=ids, labels=ids)
    results: dict[str, list[Tensor]] = {}
    steps: dict[str, Step] = {}
    row: dict[str, str] = {}

    def build() -> nn.Module:
        return llama(job.sizes, job.length, place.device, checkpointed=checkpointed)

    if not checkpointed:
        plain = build()
        compiled = job.compiled(plain, {})
        steps["whole_step"] = _training(plain, lambda: compiled(input_ids=ids, labels=ids, use_cache=False).loss)
        results["whole"] = _trained(plain, steps["whole_step"])
        row["whole_memory_gb"] = _memory(place)
    shared = build()
    # One graph, on PyTorch 2.11 too, which does not trace the wrapper.
    torch._dynamo.config.optimize_ddp = False
    shared.compile(**{**job.how, "options": job.how["options"] | {"context_parallel": context}})
    ours = DistributedDataParallel(shared)
    count = (part["shift_labels"] != -100).sum()

    def loss() -> Tensor:
        return context.mean(ours(**part, use_cache=False, num_items_in_batch=1).loss, count)

    steps["shared_step"] = _training(shared, loss)
    seen, begin = len(attn_compiler.reports()), time.perf_counter()
    results["shared"] = _trained(shared, steps["shared_step"])
    row |= {"first_seconds": f"{time.perf_counter() - begin:.1f}", "memory_gb": _memory(place)} | _found(seen)
    parts = list(zip(results["shared"], results["whole"], strict=True)) if "whole" in results else []
    yield Prepared(steps=steps, row=row, parts=parts)


@contextlib.contextmanager
def _decode(job: Job, place: Place) -> Iterator[Prepared]:
    context = place.context(job)
    model = llama(job.sizes, job.length, place.device, checkpointed=False).eval()
    ids = tokens(job.sizes, BATCH, place.device).T
    steps: dict[str, Step] = {}
    outputs: list[Tensor] = []
    row: dict[str, str] = {}
    for side, cp, more in (("whole", None, {}), ("shared", context, {"context_parallel": context})):
        seen, begin = len(attn_compiler.reports()), time.perf_counter()
        cache = filled(model, job.length, place.device, cp, dist.get_rank())
        steps[f"{side}_forward"] = stepper(job.compiled(model, more), cache, job.length, ids)
        outputs.append(steps[f"{side}_forward"]().clone())
        row |= {"first_seconds": f"{time.perf_counter() - begin:.1f}"} | _found(seen)
    whole, shared = outputs
    yield Prepared(steps=steps, row=row, parts=[(shared, whole)])


def _training(model: nn.Module, loss: Callable[[], Tensor]) -> Step:
    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        return value.detach()

    return step


def _trained(model: nn.Module, step: Step) -> list[Tensor]:
    """The loss, and the gradients of the first and the last layer."""
    loss = step()
    layers = model.model.layers
    grads = [p.grad.detach().clone() for layer in (layers[0], layers[-1]) for p in layer.parameters()]
    model.zero_grad(set_to_none=True)
    return [loss, *grads]


def _memory(place: Place) -> str:
    """The most that this process has had allocated since this was asked last."""
    if place.device == "cpu":
        return ""
    most = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return f"{most:.1f}"


def _found(seen: int) -> dict[str, str]:
    """What ran: the lowerings, and what the report notes of exchanges. seen: reports that are of something else."""
    sites = [site for report in attn_compiler.reports()[seen:] for site in report.sites]
    notes = [note for site in sites for note in site.notes if note.startswith("context parallel")]
    return {
        "lowering": " + ".join(dict.fromkeys(site.decision.lowering for site in sites)),
        "note": "; ".join(dict.fromkeys(notes))[:200],
    }


def is_short(row: Row) -> bool:
    """Whether it failed, or numbers are wrong. A peer's failure is the peer's."""
    return bool(row["method"] not in PEERS and (row.get("failure") or row.get("numerics") == "WRONG"))


def jobs(given: Namespace) -> list[Job]:
    """Each form with each length and method. PyTorch's own has causal attention alone, and is no model's. A cache is shared in one way."""
    same = {"rounds": given.rounds, "ranks": given.ranks, "dry": given.tiny}
    return [
        Job(form=form, length=length, method=method, order=order, **same)
        for form in given.forms
        for length in given.lengths
        for method in given.methods
        for order in (("head_tail",) if method in PEERS or form != "window" else ("contiguous", "head_tail"))
        if (form == "causal" or method not in PEERS) and (form != DECODE or method == "auto")
    ]


def rows(wanted: Sequence[Job], given: Namespace) -> harness.Measured:
    """Of groups of processes that compile side by side."""
    limits = members.Limits(together=given.together, seconds=given.seconds, turn_seconds=60.0)
    how = {"processes": given.ranks, "limits": limits, "until": given.until, "imports": IMPORTS}
    for job, found in members.rows(wanted, member, **how):
        yield [job.names | found]


BENCH = Bench(
    doc=__doc__, results="shared_sequence_gpus.csv", columns=COLUMNS, cases=jobs, rows=rows, budget=480.0,
    devices=("cuda:0",), sides=("whole", "shared"), failed=lambda rows: any(map(is_short, rows)),
    begin=lambda given: setattr(given, "device", "cpu" if given.tiny else "cuda:0"),
    options=(
        arg("--ranks", type=int, default=2, help="GPUs that share a sequence (%(default)s)"),
        arg("--forms", nargs="+", choices=[*FORMS, MODEL, CHECKPOINTED, DECODE], default=["causal"]),
        arg("--lengths", nargs="+", type=int, default=[16384, 65536]),
        arg("--methods", nargs="+", choices=[*METHODS, *PEERS], default=[*METHODS, *PEERS]),
        arg("--rounds", type=int, default=10, help="of timing (%(default)s)"),
        arg("--together", type=int, default=1, help="rows that compile at a time (%(default)s)"),
        arg("--seconds", type=float, default=150.0, help="how long rows may compile (%(default)s)"),
        arg("--tiny", action="store_true", help="a dry run on a CPU"),
    ),
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
