"""GPUs share a sequence: attention and whole training steps with `context_parallel`, beside one GPU and PyTorch's own.

    python -m benchmarks.bench_shared_sequence --together 8
    python -m benchmarks.bench_shared_sequence --ranks 4 --forms model --lengths 65536 --append
    python -m benchmarks.bench_shared_sequence --tiny --output /tmp/shared.csv

A row is a form (shared_sequence_cases.py), a length and a method, over NCCL, a GPU a process. "torch ..." are PyTorch's
`context_parallel`, uncompiled as people call it, which has causal attention alone. The form "model" is a training step (forward, loss,
backward) of a Llama of 8 layers with DDP; "model checkpointed" checkpoints each layer, and has no GPU beside it that would hold all of it.
"decode" is a step of that Llama with one token for each of 8 rows, over a cache of that length (shared_cache.py).
--overlaps are Inductor's own ways to run collectives beside other work. One GPU computes the whole ("whole") in turn with the ranks, in
the same processes. Attention is timed a few steps in a row. Times are medians of rounds, each of them the slowest rank's.
`efficiency`: whole / (ranks · shared). Differences are of this rank's part to one GPU's result, in the norm; the largest of all ranks.
--tiny: a dry run on a CPU over gloo. Writes benchmarks/results/shared_sequence_gpus.csv. Exits with 1 where something failed or is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import attn_compiler
from benchmarks import bench_h200, harness, members, shared_cache, shared_sequence_cases
from benchmarks.shared_sequence_cases import FORMS, FULL, PEERS, SMALL, Attention, Sizes

RESULTS = Path(__file__).parent / "results" / "shared_sequence_gpus.csv"
METHODS = ("all_gather", "all_to_all", "ring", "auto")
MODEL, CHECKPOINTED, DECODE = "model", "model checkpointed", "decode"
KEYS = ("form", "length", "method", "order", "overlap", "ranks")
TIMES = ("forward", "step")
COLUMNS = (
    *KEYS,
    "lowering",
    "note",
    "rounds",
    *(f"{side}_{what}_ms" for side in ("whole", "shared") for what in TIMES),
    *(f"efficiency_{what}" for what in TIMES),
    "output_difference",
    "gradient_difference",
    "memory_gb",
    "whole_memory_gb",
    "first_seconds",
    "numerics",
    "failure",
)
IMPORTS = (*bench_h200.IMPORTS, "benchmarks.shared_sequence_cases", "torch.distributed.tensor.experimental")
#: what Inductor is told about collectives
OVERLAPS: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "reorder": {"reorder_for_compute_comm_overlap": True},
    "schedule": {"aten_distributed_optimizations.enable_overlap_scheduling": True},
}
#: attentions that are timed as one: the host may run ahead of the GPU, as in a loop over batches. A model's step is long enough alone.
IN_A_ROW = 4
#: two computations of one attention or model in bfloat16 differ by so much
_NOISE = {"cpu": 1e-5, "cuda": 2e-2}
Step = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A row to measure. dry: on a CPU, small, without Inductor. rounds: of timing, the same in each process."""

    form: str
    length: int
    method: str
    order: str
    rounds: int
    ranks: int = 2
    overlap: str = ""
    dry: bool = False

    @property
    def names(self) -> dict[str, str]:
        return dict(
            zip(
                KEYS, (self.form, str(self.length), self.method, self.order, self.overlap, str(self.ranks)), strict=True
            )
        )

    @property
    def is_model(self) -> bool:
        return self.form in (MODEL, CHECKPOINTED)

    @property
    def sizes(self) -> Sizes:
        return SMALL if self.dry else FULL

    @property
    def size(self) -> str:
        return "small" if self.dry else "full"

    @property
    def options(self) -> dict[str, Any]:
        return {"inner": "aot_eager"} if self.dry else {}


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


# ---- one process ----------------------------------------------------------------------------------------------------


def member(rank: int, folder: str, job: Job) -> None:
    """One process of a row: writes the row, or with how it failed. Ends with 1 then."""
    members.write(rank, folder, lambda: _joined(rank, folder, job), bench_h200.failure)


def _joined(rank: int, folder: str, job: Job) -> dict[str, str]:
    with members.joined(rank, folder, job.ranks, dry=job.dry) as (mesh, device):
        return measure(job, Place(mesh=mesh, device=device), ready=lambda: members.wait_for_turn(rank, folder))


def measure(job: Job, place: Place, *, ready: Callable[[], None] = lambda: None) -> dict[str, str]:
    """The row, but for its names. Each process of the group calls it. ready: called once all is compiled, before anything is timed."""
    prepare = (
        _peer if job.method in PEERS else _model if job.is_model else _decode if job.form == DECODE else _attention
    )
    with prepare(job, place) as prepared:
        row = prepared.row | _differences(prepared.parts, place.device)
        prepared.parts.clear()
        if not job.dry:
            torch.cuda.empty_cache()
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
            together = harness.milliseconds(functools.partial(_in_a_row, steps[name], in_a_row), place.device)
            # The first round warms up.
            if at:
                found[name].append(together / in_a_row)
        order.reverse()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
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


def _in_a_row(step: Step, times: int) -> Tensor:
    for _ in range(times - 1):
        step()
    return step()


def _differences(parts: Sequence[tuple[Tensor, Tensor]], device: str) -> dict[str, str]:
    """The largest of all ranks, and whether they are within noise. parts: none where there is nothing beside."""
    if not parts:
        return {}
    own = [float((found - wanted).float().norm() / wanted.float().norm()) for found, wanted in parts]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    largest = [max(values) for values in zip(*gathered, strict=True)]
    # A NaN is no number below the limit.
    right = all(value <= _NOISE[torch.device(device).type] for values in gathered for value in values)
    return {
        "output_difference": f"{largest[0]:.3g}",
        "gradient_difference": f"{max(largest[1:]):.3g}" if largest[1:] else "",
        "numerics": "ok" if right else "WRONG",
    }


# ---- what is measured -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _attention(job: Job, place: Place) -> Iterator[Prepared]:
    given = shared_sequence_cases.tensors(job.length, job.sizes, place.device)
    grad = given.pop("grad")
    context = place.context(job)
    cut = _cut(place, job.order)
    part = cut.shard(**given, grad=grad)
    own_grad = part.pop("grad")
    how: dict[str, Any] = {"backend": harness.BACKEND, "dynamic": False, "fullgraph": True}
    steps: dict[str, Step] = {}
    results: dict[str, list[Tensor]] = {}
    row: dict[str, str] = {}
    for side, values, at_end, more in (
        ("whole", given, grad, {}),
        ("shared", part, own_grad, {"context_parallel": context}),
    ):
        seen = len(attn_compiler.reports())
        module = torch.compile(Attention(job.form, job.sizes), options=job.options | more, **how)
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
    given = shared_sequence_cases.tensors(job.length, job.sizes, place.device)
    wanted = _of_one_gpu(job, place, given)
    with shared_sequence_cases.peer_parts(PEERS[job.method], place.mesh, given, job.sizes) as (q, k, v, grad):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]

        def forward() -> Tensor:
            with torch.no_grad():
                return shared_sequence_cases.peer_step(*leaves)

        def step() -> Tensor:
            for leaf in leaves:
                leaf.grad = None
            out = shared_sequence_cases.peer_step(*leaves)
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
    out = shared_sequence_cases.peer_step(*leaves)
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
    ids = shared_sequence_cases.tokens(job.size, job.length, place.device)
    context = place.context(job)
    part = context.shard(input_ids=ids, labels=ids)
    how: dict[str, Any] = {"backend": harness.BACKEND, "dynamic": False}
    results: dict[str, list[Tensor]] = {}
    steps: dict[str, Step] = {}
    row: dict[str, str] = {}

    def build() -> nn.Module:
        return shared_sequence_cases.llama(job.size, job.length, place.device, checkpointed=checkpointed)

    if not checkpointed and not job.overlap:
        plain = build()
        compiled = torch.compile(plain, options=job.options, **how)
        steps["whole_step"] = _training(plain, lambda: compiled(input_ids=ids, labels=ids, use_cache=False).loss)
        results["whole"] = _trained(plain, steps["whole_step"])
        row["whole_memory_gb"] = _memory(place)
    shared = build()
    # One graph, on PyTorch 2.11 too, which does not trace the wrapper.
    torch._dynamo.config.optimize_ddp = False
    shared.compile(options=job.options | OVERLAPS[job.overlap] | {"context_parallel": context}, **how)
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
    model = shared_sequence_cases.llama(job.size, job.length, place.device, checkpointed=False).eval()
    ids = shared_sequence_cases.tokens(job.size, shared_cache.BATCH, place.device).T
    steps: dict[str, Step] = {}
    outputs: list[Tensor] = []
    row: dict[str, str] = {}
    for side, cp, more in (("whole", None, {}), ("shared", context, {"context_parallel": context})):
        seen, begin = len(attn_compiler.reports()), time.perf_counter()
        cache = shared_cache.filled(model, job.length, place.device, cp, dist.get_rank())
        compiled = torch.compile(model, backend=harness.BACKEND, dynamic=False, options=job.options | more)
        steps[f"{side}_forward"] = shared_cache.stepper(compiled, cache, job.length, ids)
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


# ---- rows -----------------------------------------------------------------------------------------------------------


def said(row: Mapping[str, str]) -> str:
    """A row, for people."""
    words = ", ".join(f"{name} {row[name]}" for name in COLUMNS if row.get(name))
    return words if not row.get("failure") else f"FAILED {words}"


def is_short(row: Mapping[str, str]) -> bool:
    """Whether it failed, or numbers are wrong. A peer's failure is the peer's."""
    return bool(row["method"] not in PEERS and (row.get("failure") or row.get("numerics") == "WRONG"))


def jobs(given: argparse.Namespace) -> list[Job]:
    """Each form with each length and method. PyTorch's own has causal attention alone, and is no model's. A cache is shared in one way."""
    return [
        Job(
            form=form,
            length=length,
            method=method,
            order=order,
            rounds=given.rounds,
            ranks=given.ranks,
            overlap=overlap,
            dry=given.tiny,
        )
        for form in given.forms
        for length in given.lengths
        for method in given.methods
        for order in (("head_tail",) if method in PEERS or form != "window" else ("contiguous", "head_tail"))
        for overlap in (given.overlaps if form in (MODEL, CHECKPOINTED) else ("",))
        if (form == "causal" or method not in PEERS) and (form != DECODE or method == "auto")
    ]


def main() -> int:
    """Measure, print and write; 0 where every row is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="GPUs that share a sequence (%(default)s)")
    parser.add_argument("--forms", nargs="+", choices=[*FORMS, MODEL, CHECKPOINTED, DECODE], default=["causal"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[16384, 65536])
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, *PEERS], default=[*METHODS, *PEERS])
    parser.add_argument("--overlaps", nargs="+", choices=[*OVERLAPS], default=[""], help="of models")
    parser.add_argument("--rounds", type=int, default=10, help="of timing (%(default)s)")
    parser.add_argument("--together", type=int, default=1, help="rows that compile at a time (%(default)s)")
    parser.add_argument("--seconds", type=float, default=150.0, help="how long rows may compile (%(default)s)")
    parser.add_argument("--budget-seconds", type=float, default=480.0, help="begin no wave after that (%(default)s)")
    parser.add_argument("--append", action="store_true", help="keep the rows of the file and measure only the others")
    parser.add_argument("--tiny", action="store_true", help="a dry run on a CPU")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="the commit to name in the rows, where this is no checkout")
    given = parser.parse_args()

    until = time.monotonic() + given.budget_seconds
    where = harness.environment("cpu" if given.tiny else "cuda:0", given.commit)
    file = harness.CsvFile(given.output, [*COLUMNS, *where], append=given.append)
    done = {tuple(row[key] for key in KEYS) for row in file.rows if row["device"] == where["device"]}
    wanted = [job for job in jobs(given) if tuple(job.names.values()) not in done]
    limits = members.Limits(together=given.together, seconds=given.seconds, turn_seconds=60.0)
    begin = time.monotonic()
    for job, found in members.rows(wanted, member, processes=given.ranks, limits=limits, until=until, imports=IMPORTS):
        row = job.names | found
        file.add(row | where)
        print(f"at {time.monotonic() - begin:.0f} s, {said(row)}", flush=True)
    return int(any(map(is_short, file.rows)))


if __name__ == "__main__":
    sys.exit(main())
