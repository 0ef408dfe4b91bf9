"""How exact the gradients of FP8 attention are, and whether they are biased: against float64, with bfloat16's own beside them.

    python -m benchmarks.fp8_gradients benchmarks/results/fp8_gradients.csv
    python -m benchmarks.fp8_gradients benchmarks/results/fp8_gradients_h200.csv --device cuda --lowering hopper_fp8

One causal attention, inputs in bfloat16, a random gradient of its output. The first is emulated on a CPU, as in fp8_accuracy.py.
What FP8 does to gradients shows where keys and values have a mean: a row of the scores' gradient adds up to 0, and what it does not, by
rounding, comes out multiplied by the mean key.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from attn_compiler import DelayedScaling, Fp8Recipe
from benchmarks import fp8_accuracy, fp8_training, harness

BASELINE = fp8_accuracy.BASELINE
RECIPES: dict[str, Fp8Recipe] = {
    name: fp8_accuracy.RECIPES[name] for name in ("per tensor", "per head", "per block", "smooth_k, hadamard, int8")
}
#: of keys, and of values: how far their mean is from 0, where 1 is how far they are from it, in each dim
MEANS: dict[str, tuple[float, float]] = {
    "normal": (0.0, 0.0),
    "keys around 3": (3.0, 0.0),
    "values around 3": (0.0, 3.0),
    "both around 1": (1.0, 1.0),
    "both around 3": (3.0, 3.0),
}
LLAMA = "llama"
HEADS = 4
#: steps that the model has learnt whose activations are taken
_LEARNT = 200
COLUMNS = ("inputs", "seqlen", "head_dim", "recipe", *(f"{kind}_{x}" for x in "qkv" for kind in ("error", "slope")))

Inputs = tuple[Tensor, Tensor, Tensor]


def inputs(kind: str, seqlen: int, head_dim: int) -> Inputs:
    """(1, heads, S, D) each, of MEANS."""
    generator = torch.Generator().manual_seed(0)
    mean_k, mean_v = MEANS[kind]
    q, k, v = (torch.randn(1, HEADS, seqlen, head_dim, generator=generator) for _ in range(3))
    of_k, of_v = (torch.randn(1, HEADS, 1, head_dim, generator=generator) for _ in range(2))
    return q, k + mean_k * of_k, v + mean_v * of_v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def compiled(recipe: Fp8Recipe, lowering: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Causal attention under a recipe."""
    options = {"fp8_recipe": recipe, "lowering": lowering, "inner": "aot_eager", "strict": True}
    found: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.compile(
        causal, backend="attn_compiler", options=options, dynamic=False, fullgraph=True
    )
    return found


def gradients(function: Callable[[Tensor, Tensor, Tensor], Tensor], given: Inputs, upstream: Tensor) -> list[Tensor]:
    """Of q, k and v. A recipe with delayed scaling has seen the same before."""
    found: list[Tensor] = []
    for _ in range(2):
        leaves = [x.detach().requires_grad_() for x in given]
        found = list(torch.autograd.grad(function(*leaves), leaves, upstream))
    return found


def compare(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """The error's norm as a share of the exact one's, and what the exact one comes out multiplied by, less 1: the bias."""
    found, exact = found.double(), exact.double()
    slope = (found * exact).sum() / exact.square().sum() - 1
    return float((found - exact).norm() / exact.norm()), float(slope)


def measure(kind: str, given: Inputs, device: str, lowering: str) -> Iterator[dict[str, str]]:
    """A row for bfloat16, and one for each recipe."""
    q, k, v = (x.to(device, torch.bfloat16) for x in given)
    upstream = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    exact = gradients(causal, (q.double(), k.double(), v.double()), upstream.double())
    recipes = {BASELINE: None, **RECIPES, "delayed": Fp8Recipe(scaling=DelayedScaling())}
    for name, recipe in recipes.items():
        torch._dynamo.reset()
        function = causal if recipe is None else compiled(recipe, lowering)
        row = {"inputs": kind, "seqlen": str(q.shape[2]), "head_dim": str(q.shape[3]), "recipe": name}
        for x, own, right in zip("qkv", gradients(function, (q, k, v), upstream), exact, strict=True):
            error, slope = compare(own, right)
            row |= {f"error_{x}": f"{error:.5f}", f"slope_{x}": f"{slope:+.5f}"}
        yield row


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    table = Table(title="gradients against float64: the error's norm, and the slope less 1")
    for name in COLUMNS:
        table.add_column(name)
    for row in rows:
        table.add_row(*(row[name] for name in COLUMNS))
    Console(width=140).print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the CSV and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lowering", default="reference_fp8")
    parser.add_argument("--inputs", nargs="*", default=[*MEANS, LLAMA], choices=[*MEANS, LLAMA])
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--commit")
    given = parser.parse_args(arguments)
    environment = harness.environment(given.device, given.commit)
    file = harness.CsvFile(given.results, (*COLUMNS, *environment))
    setup = fp8_training.ON_GPU if given.device == "cuda" else fp8_training.EMULATED
    for kind in given.inputs:
        tensors = (
            fp8_training.activations(_LEARNT, setup) if kind == LLAMA else inputs(kind, given.seqlen, given.head_dim)
        )
        for row in measure(kind, tensors, given.device, given.lowering):
            file.add({**row, **environment})
    print_table(file.rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
