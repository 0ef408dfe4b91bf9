"""Masked attention on a CPU: by rows (`rows`), and by PyTorch's flash kernel with the mask as a tensor.

    python -m benchmarks.bench_rows

The sides take turns in one process; columns are medians of the process's own milliseconds. Writes benchmarks/results/rows_cpu.csv.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks import harness

RESULTS = Path(__file__).parent / "results" / "rows_cpu.csv"
SIDES = ("rows", "sdpa_cpu_flash")
KEYS = ("mask", "dtype", "shape", "training")
#: (mask, batch, heads, queries, keys, head dim)
CASES = (
    ("padding", 32, 12, 24, 24, 32),
    ("padding", 32, 12, 59, 59, 32),
    ("padding", 4, 12, 128, 128, 64),
    ("padding", 8, 12, 512, 512, 64),
    ("causal and padding", 4, 8, 128, 128, 64),
    ("causal and padding", 4, 8, 1024, 1024, 64),
    ("window", 1, 8, 2048, 2048, 64),
    ("documents", 1, 12, 2048, 2048, 64),
    ("cache", 8, 32, 1, 2048, 128),
    ("bias by distance and padding", 32, 12, 59, 59, 32),
    ("bias by distance and padding", 4, 12, 128, 128, 64),
    ("bias by distance and padding", 8, 12, 512, 512, 64),
    ("bias by distance and padding", 4, 12, 1024, 1024, 64),
)
#: attentions in a row that share a mask with a bias, as the layers of T5 do
_LAYERS = 6
#: those that are measured in half precision, too
_HALF = (
    ("bias by distance and padding", 512),
    ("bias by distance and padding", 1024),
    ("padding", 59),
    ("padding", 512),
    ("causal and padding", 1024),
    ("cache", 2048),
)
ROUNDS = 9

Attention = Callable[..., torch.Tensor]


def padding(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    seen = torch.arange(k.shape[2]) < lengths[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None, :])


def causal_and_padding(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    at = torch.arange(k.shape[2])
    seen = (at < lengths[:, None])[:, None, None, :] & (at[:, None] >= at[None, :])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    at = torch.arange(k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(at[:, None] - at[None, :]).abs() <= 64)


def documents(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(of[:, None] == of[None, :])[None, None])


def cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    seen = torch.arange(k.shape[2]) <= position[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[None, None])


def bias(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    at = torch.arange(k.shape[2])
    ahead = (at[None, :] - at[:, None]).clamp(-64, 64) + 64
    added = table[ahead].permute(2, 0, 1)[None]
    seen = (at < lengths[:, None])[:, None, None, :]
    added = torch.where(seen, added, torch.finfo(q.dtype).min)
    for _ in range(_LAYERS):
        q = F.scaled_dot_product_attention(q, k, v, attn_mask=added)
    return q


KINDS: dict[str, Attention] = {
    "padding": padding,
    "causal and padding": causal_and_padding,
    "window": window,
    "documents": documents,
    "cache": cache,
    "bias by distance and padding": bias,
}


def further(mask: str, batch: int, queries: int, keys: int) -> torch.Tensor:
    if mask == "documents":
        return torch.arange(keys) // (keys // 16)
    if mask == "cache":
        return torch.tensor([keys // 4])
    return torch.linspace(keys // 4, keys, batch).long()


def measure(only: str = "") -> Iterator[dict[str, str]]:
    """A row for each case, dtype and direction. only: of masks whose name begins so."""
    for mask, batch, heads, queries, keys, head_dim in CASES:
        if not mask.startswith(only):
            continue
        for dtype in (torch.float32, torch.bfloat16) if (mask, keys) in _HALF else (torch.float32,):
            for training in (False, True) if queries > 1 else (False,):
                shape = (batch, heads, queries, keys, head_dim)
                yield _row(mask, shape, dtype, training)


def _row(mask: str, shape: tuple[int, ...], dtype: torch.dtype, training: bool) -> dict[str, str]:
    batch, heads, queries, keys, head_dim = shape
    sizes = (queries, keys, keys)
    inputs = [
        torch.randn(batch, n, heads, head_dim, dtype=dtype).transpose(1, 2).requires_grad_(training) for n in sizes
    ]
    given = [further(mask, batch, queries, keys)]
    if mask.startswith("bias"):
        given.append(torch.randn(129, heads, dtype=dtype))
    noise = torch.randn(batch, heads, queries, head_dim, dtype=dtype)
    steps = {}
    for side in SIDES:
        torch._dynamo.reset()
        options = {"lowering": side}
        compiled = torch.compile(KINDS[mask], backend="attn_compiler", dynamic=False, options=options)

        def step(compiled: Attention = compiled) -> None:
            out = compiled(*inputs, *given)
            if training:
                torch.autograd.grad(out, inputs, noise)

        step()
        steps[side] = step
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for round_ in range(ROUNDS):
        for side in list(steps)[:: 1 if round_ % 2 else -1]:
            start = time.process_time()
            steps[side]()
            times[side].append((time.process_time() - start) * 1e3)
    named = {
        "mask": mask,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": " x ".join(map(str, shape)),
        "training": "yes" if training else "no",
    }
    return named | {f"{side}_ms": f"{statistics.median(t):.4g}" for side, t in times.items()}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--only", default="", help="masks whose name begins so")
    parser.add_argument("--append", action="store_true", help="to what is in the file")
    parser.add_argument("--commit", help="the commit to name in the rows, where this is no checkout")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    where = harness.environment("cpu", options.commit)
    file = harness.CsvFile(options.output, [*KEYS, *(f"{side}_ms" for side in SIDES), *where], append=options.append)
    for row in measure(options.only):
        file.add({**row, **where})
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
