"""What runs beside one masked attention on a GPU, by the profiler: its lists of tiles and what they are made from.

    python -m benchmarks.bench_tile_lists [--batch-lengths 1x512 …] [--masks padded …] [--train]

Each row is one attention of 16 heads of 128 in bfloat16 with the Triton lowering. `lists_us`: the kernels that make lists; `beside_us`:
every kernel but the attention's own; `share`: of those in the attention's own time. Lists are made once a graph for all layers with one
mask, so a model pays the share of one of its layers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import attn_compiler
from benchmarks import harness

RESULTS = Path(__file__).parent / "results" / "tile_lists_h200.csv"
HEADS, HEAD_DIM, CALLS = 16, 128, 3
COLUMNS = (
    *("mask", "batch", "seqlen", "training", "lists_us", "beside_us", "attention_us", "share", "kernels_beside", "first_call_s"),
)  # fmt: skip
CASES = ("1x512", "64x512", "1x2048", "16x2048", "1x8192", "16x8192", "1x32768", "4x32768", "1x65536", "2x65536")

Mask = Callable[[torch.Tensor], torch.Tensor]


def _indices(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.arange(given.shape[1], device=given.device)
    return at[:, None], at[None]


def padded(given: torch.Tensor) -> torch.Tensor:
    """Causal, and padding as truth values of keys."""
    queries, keys = _indices(given)
    return (keys <= queries) & (given > 0)[:, None, None]


def packed(given: torch.Tensor) -> torch.Tensor:
    """Causal within documents."""
    queries, keys = _indices(given)
    return (keys <= queries) & (given[:, None, :, None] == given[:, None, None])


def windowed(given: torch.Tensor) -> torch.Tensor:
    """The last 1024 keys, and padding."""
    queries, keys = _indices(given)
    return (keys <= queries) & (keys > queries - 1024) & (given > 0)[:, None, None]


MASKS: dict[str, Mask] = {mask.__name__: mask for mask in (padded, packed, windowed)}


def _given(batch: int, seqlen: int) -> torch.Tensor:
    """int32 (batch, seqlen): document numbers from 1 on, 0 for padding; the first row has none."""
    generator = torch.Generator().manual_seed(seqlen)
    lengths = torch.randint(seqlen // 2, seqlen + 1, (batch, 1), generator=generator)
    lengths[0] = seqlen
    at = torch.arange(seqlen)
    return torch.where(at < lengths, 1 + at // max(seqlen // 7, 1), 0).int().cuda()


def measure(name: str, batch: int, seqlen: int, *, training: bool) -> dict[str, str]:
    """One row."""
    mask = MASKS[name]

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        # As in models: what comes next reads the heads of a position together.
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(given)).transpose(1, 2)

    torch._dynamo.reset()
    attn_compiler.reset()
    compiled = torch.compile(model, backend="attn_compiler", dynamic=False, options={"lowering": "triton"})
    shape = (batch, seqlen, HEADS, HEAD_DIM)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
    inputs = [x.requires_grad_(training) for x in inputs]
    given = _given(batch, seqlen)

    noise = torch.randn((batch, seqlen, HEADS, HEAD_DIM), device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        output = compiled(*inputs, given)
        if training:
            torch.autograd.grad(output, inputs, noise)
        torch.cuda.synchronize()

    begin = time.perf_counter()
    step()
    first = time.perf_counter() - begin
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            step()
    times = {e.key: e.self_device_time_total / CALLS for e in profile.key_averages() if e.self_device_time_total > 0}
    attention = sum(us for kernel, us in times.items() if "attention" in kernel)
    beside = {kernel: us for kernel, us in times.items() if "attention" not in kernel}
    return {
        "mask": name,
        "batch": str(batch),
        "seqlen": str(seqlen),
        "training": str(training),
        "lists_us": f"{sum(us for kernel, us in beside.items() if 'tile_' in kernel):.1f}",
        "beside_us": f"{sum(beside.values()):.1f}",
        "attention_us": f"{attention:.1f}",
        "share": f"{sum(beside.values()) / attention:.4f}",
        "kernels_beside": " ".join(sorted(kernel[:48] for kernel in beside)),
        "first_call_s": f"{first:.2f}",
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-lengths", nargs="+", default=list(CASES), help="batch × length, as 16x2048")
    parser.add_argument("--masks", nargs="+", default=list(MASKS), choices=list(MASKS))
    parser.add_argument("--train", action="store_true", help="forward and backward")
    parser.add_argument("--append", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="the commit to name in the rows, where this is no checkout")
    options = parser.parse_args()
    where = harness.environment("cuda", options.commit)
    file = harness.CsvFile(options.output, [*COLUMNS, *where], append=options.append)
    for name in options.masks:
        for case in options.batch_lengths:
            batch, seqlen = map(int, case.split("x"))
            row = measure(name, batch, seqlen, training=options.train)
            file.add({**row, **where})
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
