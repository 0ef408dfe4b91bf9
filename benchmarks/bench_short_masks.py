"""Padded attention of short lengths on a GPU, by lowering: the whole of what is compiled, lists of tiles and copies included.

    python -m benchmarks.bench_short_masks [--lengths 64 128] [--batches 1 16] [--head-dims 64]

Each side is captured in a CUDA graph, so that the host counts for none, and the sides take turns in one process. Columns are medians in
microseconds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks import harness

RESULTS = Path(__file__).parent / "results" / "short_masks_h200.csv"
LOWERINGS = ("sdpa_cudnn", "sdpa_efficient", "triton")
#: by head dim, as BERT and Llama have them
HEADS = {64: 12, 128: 16}
COLUMNS = ("head_dim", "heads", "causal", "seqlen", "batch", "training", *(f"{name}_us" for name in LOWERINGS))
ROUNDS, REPLAYS, WARMUP = 25, 5, 3

Replay = Callable[[], None]


def _model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, causal: bool) -> torch.Tensor:
    seen = mask[:, None, None, :]
    if causal:
        at = torch.arange(q.shape[2], device=q.device)
        seen = seen & (at[None, :] <= at[:, None])[None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)


def _padding(batch: int, seqlen: int) -> torch.Tensor:
    """bool (batch, seqlen): up to half of a row is padding, on the right."""
    lengths = torch.tensor([seqlen - row * 37 % (seqlen // 2) for row in range(batch)], device="cuda")
    return torch.arange(seqlen, device="cuda") < lengths[:, None]


def _captured(step: Replay) -> Replay:
    step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def measure(head_dim: int, causal: bool, seqlen: int, batch: int, *, training: bool) -> dict[str, str]:
    """One row."""
    heads = HEADS[head_dim]
    shape = (batch, seqlen, heads, head_dim)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
    inputs = [x.requires_grad_(training) for x in inputs]
    mask, noise = _padding(batch, seqlen), torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def replay_of(lowering: str) -> Replay:
        torch._dynamo.reset()
        compiled = torch.compile(_model, backend="attn_compiler", dynamic=False, options={"lowering": lowering})

        def step() -> None:
            output = compiled(*inputs, mask, causal)
            if training:
                torch.autograd.grad(output, inputs, noise)

        return _captured(step)

    replays = {name: replay_of(name) for name in LOWERINGS}
    times: dict[str, list[float]] = {name: [] for name in replays}
    for round_ in range(ROUNDS):
        for name in list(replays)[:: 1 if round_ % 2 else -1]:
            times[name].append(_microseconds(replays[name]))
    row = {
        "head_dim": str(head_dim),
        "heads": str(heads),
        "causal": str(causal),
        "seqlen": str(seqlen),
        "batch": str(batch),
        "training": str(training),
    }
    return row | {f"{name}_us": f"{statistics.median(t):.1f}" for name, t in times.items()}


def _microseconds(replay: Replay) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(REPLAYS):
        replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / REPLAYS * 1e3


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", nargs="+", type=int, default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[64, 128, 256, 384])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="the commit to name in the rows, where this is no checkout")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    where = harness.environment("cuda", options.commit)
    file = harness.CsvFile(options.output, [*COLUMNS, *where])
    cases = itertools.product(options.head_dims, (False, True), options.lengths, options.batches, (False, True))
    for head_dim, causal, seqlen, batch, training in cases:
        row = measure(head_dim, causal, seqlen, batch, training=training)
        file.add({**row, **where})
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
