"""A training step of packed rows beside what people use for them: dense masks, flex_attention and FlashAttention-4 through transformers.

    python -m benchmarks.bench_packed --jobs 8 --size small --device cpu     # a look at the script
    python -m benchmarks.bench_packed --jobs 8                               # on a GPU

Models of 8 layers take 2 rows of 8192 tokens, 8 documents each, as transformers' collator packs them: position_ids that begin again, and
cu_seq_lens. All sides have the same weights. Each is compiled in a process of its own, beside the others, and timed alone. "dense":
Inductor with SDPA, for which transformers makes a mask of position_ids. "flex": Inductor with flex_attention. "fa4": Inductor around
flash_attn.cute's function for packed rows. "ours": our backend with SDPA. `first_s`: compilation and first step. `error`: ‖gradients -
those in float32‖ / ‖those in float32‖. A side whose library the profiler does not see is a failure.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import attn_compiler
from benchmarks import bench_h200, compare, harness, models, waves
from benchmarks.harness import BACKEND, BASELINE, Bench, arg, failure

SIDES = {"ours": "sdpa", "dense": "sdpa", "flex": "flex_attention", "fa4": "fa4_packed"}
#: what the profiler calls a side's kernels
NAMED = {
    "dense": re.compile(r"cudnn.*(sdpa|flash)|fmha", re.IGNORECASE),
    "flex": re.compile("flex_attention"),
    "fa4": bench_h200.PINNED_KERNEL["fa4"],
}
COLUMNS = (
    *("model", "side", "inputs", "documents", "lowerings", "rounds", "p20_ms", "p50_ms", "p80_ms", "over_ours"),
    *("first_s", "peak_mib", "error", "attention_ms", "attention_kernels", "failure"),
)
#: tokens of documents, which follow each other: 1024 on average
LENGTHS = (1700, 300, 1100, 900, 2300, 60, 1300, 532)


@torch.library.custom_op("benchmarks::fa4_packed", mutates_args=())
def fa4(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of packed rows, (tokens, heads, D), causal within documents. Returns out and lse."""
    flash: Any = importlib.import_module("flash_attn.cute.interface")
    out, lse, *_ = flash._flash_attn_fwd(q, k, v, **_asked(bounds, longest, scale), return_lse=True)
    return out, lse


@torch.library.custom_op("benchmarks::fa4_packed_backward", mutates_args=())
def fa4_backward(
    given: list[Tensor], grad: Tensor, bounds: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. given: q, k, v, out, lse."""
    flash: Any = importlib.import_module("flash_attn.cute.interface")
    dq, dk, dv = flash._flash_attn_bwd(*given[:4], grad, given[4], **_asked(bounds, longest, scale))
    return dq, dk, dv


def _asked(bounds: Tensor, longest: int, scale: float) -> dict[str, Any]:
    sizes = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return {**sizes, "softmax_scale": scale, "causal": True}


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bounds, *ctx.further = inputs
    ctx.save_for_backward(q, k, v, *output, bounds)


def _grads(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *given, bounds = ctx.saved_tensors
    return *fa4_backward(list(given), grad.contiguous(), bounds, *ctx.further), None, None, None


fa4.register_fake(lambda q, *_: (torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)))
fa4_backward.register_fake(lambda given, *_: tuple(map(torch.empty_like, given[:3])))
fa4.register_autograd(_grads, setup_context=_keep)


def attention(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Any, *, scaling: float, **further: Any
) -> tuple[Tensor, None]:
    """FlashAttention-4 for transformers. query, key, value: (batch, heads, tokens, D)."""
    q, k, v = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (query, key, value))
    out, _ = fa4(q, k, v, further["cu_seq_lens_q"], further["max_length_q"], scaling)
    return out.unflatten(0, (query.shape[0], query.shape[2])), None


@dataclass(frozen=True, kw_only=True)
class Packed(harness.Named):
    """A family of models.toml, at 8 layers, and one of SIDES."""

    model: str
    side: str


def inputs(size: str, device: str) -> dict[str, Any]:
    """As transformers' DataCollatorWithFlattening makes them, of 2 rows."""
    lengths = LENGTHS if size == "full" else (60, 4, 64)
    bounds = torch.tensor((0, *2 * lengths)).cumsum(0).int().to(device)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1).contiguous().to(device)
    ids = torch.randint(3, 1000, positions.shape, generator=torch.Generator().manual_seed(0)).to(device)
    of_flash = {f"cu_seq_lens_{x}": bounds for x in "qk"} | {f"max_length_{x}": max(lengths) for x in "qk"}
    return {"input_ids": ids, "position_ids": positions, "use_cache": False, **of_flash}


def prepare(what: tuple[Packed, Namespace], lock: AbstractContextManager[Any]) -> waves.Finish:
    """Compile a side of a model, and compare its gradients with float32's. Whatever fails becomes the row's `failure`."""
    asked, given = what
    transformers, device = importlib.import_module("transformers"), given.device
    transformers.AttentionInterface.register(SIDES["fa4"], attention)
    transformers.AttentionMaskInterface.register(SIDES["fa4"], lambda *_, **__: None)
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        torch.compiler.reset()
        attn_compiler.reset()
        torch.compile(torch.sin)(torch.ones(8, device=device))  # What a process pays once is no side's first step.
        taken = inputs(given.size, device)
        model = models.build(asked.model, given.size, SIDES[asked.side], torch.bfloat16, device).train()
        begun = time.monotonic()
        backend = BACKEND if asked.side == "ours" else BASELINE
        case = compare.Case(model=model, inputs=taken, device=device, training=True)
        compiled: Any = torch.compile(model, backend=backend, dynamic=False)
        step = case.step(compiled)
        step()
        harness.synchronize(device)
        row = {"first_s": f"{time.monotonic() - begun:.1f}", "documents": str(len(taken["cu_seq_lens_q"]) - 1)}
        row["inputs"] = "x".join(map(str, taken["input_ids"].shape))
        row["lowerings"] = compare.chosen(attn_compiler.reports())["lowerings"] if asked.side == "ours" else ""
        bench_h200.forget(case, device)
        with lock:
            precise = models.build(asked.model, given.size, "sdpa", torch.bfloat16, device).train().float()
            expected = compare.results(case, precise, case.step(precise))
            row["error"] = f"{compare.relative_error(compare.results(case, model, step), expected):.3g}"
            del precise, expected
            bench_h200.forget(case, device)
    except Exception as error:  # noqa: BLE001 (a library that is not there or fails costs its own row alone)
        failed = {"failure": failure(error)}
        return lambda: failed
    return functools.partial(_finish, asked, given, case, step, row)


def _finish(
    asked: Packed, given: Namespace, case: compare.Case, step: harness.Step, row: dict[str, str]
) -> dict[str, str]:
    """The rest of a row."""
    times = harness.interleave({asked.side: step}, given.device, seconds=given.seconds)[asked.side]
    low, middle, high = (f"{ms:.4g}" for ms in harness.percentiles(times))
    row |= {"rounds": str(len(times)), "p20_ms": low, "p50_ms": middle, "p80_ms": high}
    if given.device != "cpu":
        bench_h200.forget(case, given.device)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        seen = bench_h200.attention_kernels(step)
        row["peak_mib"] = f"{(torch.cuda.max_memory_allocated() - held) / 2**20:.0f}"
        row["attention_ms"] = f"{sum(ms for _, ms in seen.values()):.3f}"
        row["attention_kernels"] = " | ".join(f"{name[:60]} x{count}" for name, (count, _) in seen.items())[:400]
        bench_h200.forget(case, given.device)
        ours = asked.side == "ours" and bench_h200.pinned(row["lowerings"], seen) == "yes"
        if not ours and not (asked.side in NAMED and any(NAMED[asked.side].search(name) for name in seen)):
            row["failure"] = "other kernels ran than those of the named library"
    return row


def rows(cases: Sequence[Packed], given: Namespace) -> harness.Measured:
    """Of sides as they come: all are compiled before any is timed."""
    asked, medians = waves.asked(given), dict[str, float]()
    for (case, _), row in waves.run(
        [(case, given) for case in cases], prepare, until=given.until, imports=bench_h200.IMPORTS, **asked
    ):
        found = {**case.names, **(row or {})}
        if "p50_ms" in found:
            if case.side == "ours":
                medians[case.model] = float(found["p50_ms"])
            if case.model in medians:
                found["over_ours"] = f"{float(found['p50_ms']) / medians[case.model]:.3f}"
        yield [found]


BENCH = Bench(
    doc=__doc__, results="packed_h200.csv", columns=COLUMNS, rows=rows, sides=SIDES,
    cases=lambda given: [Packed(model=name, side=side) for name in given.models for side in given.sides],
    options=(arg("--models", nargs="+", default=["llama", "qwen3"]), arg("--sides", nargs="+", default=list(SIDES))),
    seconds=3.0, budget=200.0, sized=True, jobs=True, where=bench_h200.where,
    short=("model", "side", "p50_ms", "over_ours", "first_s", "peak_mib", "error", "attention_ms", "failure"),
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
