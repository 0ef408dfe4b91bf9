"""How exact FP8 attention is: forward errors against float64 for several recipes and inputs, with bfloat16's own beside them.

    python -m benchmarks.fp8_accuracy benchmarks/results/fp8_accuracy.csv docs/fp8_accuracy.png

Emulated, on any device: lowering="reference_fp8" computes what the kernel does, tile by tile, but with products summed in float32, where
tensor cores keep fewer bits. `--device cuda --lowering triton_fp8` is the kernel itself. Inputs are bfloat16, the exact result is that
of those. The picture wants matplotlib.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler import CurrentScaling, Fp8Recipe
from benchmarks import fp8_training

BASELINE = "bfloat16"
RECIPES: dict[str, Fp8Recipe] = {
    "per tensor": Fp8Recipe(scaling=CurrentScaling(granularity="tensor")),
    "per head": Fp8Recipe(scaling=CurrentScaling(granularity="head")),
    "per block": Fp8Recipe(),
    "smooth_k": Fp8Recipe(smooth_k=True),
    "hadamard": Fp8Recipe(hadamard=True),
    "smooth_k, hadamard": Fp8Recipe(smooth_k=True, hadamard=True),
    "int8": Fp8Recipe(qk_format="int8"),
    "smooth_k, hadamard, int8": Fp8Recipe(smooth_k=True, hadamard=True, qk_format="int8"),
}
HEADS = 4
#: Of the retrieval: queries, and what they look for among.
_NEEDLES, _VALUES = 256, 64
_QUERIES_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True)
class Row:
    """rmse: of all elements. cosine: of all elements as one vector. worst_row: the largest error of a row's vector, as a share of the
    rms of such vectors. found: of the retrieval, the share of right answers; None elsewhere."""

    inputs: str
    seqlen: int
    head_dim: int
    recipe: str
    rmse: float
    cosine: float
    worst_row: float
    found: float | None = None


# ---- inputs ---------------------------------------------------------------------------------------------------------


def normal(seqlen: int, head_dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """N(0, 1)"""
    q, k, v = (torch.randn(1, HEADS, seqlen, head_dim, generator=generator) for _ in range(3))
    return q, k, v


def outliers(seqlen: int, head_dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """N(0, 1) + N(0, 100) · Bernoulli(0.001), as FlashAttention-3 was judged on (https://arxiv.org/abs/2407.08608, 4.3)."""

    def one() -> Tensor:
        x, far = (torch.randn(1, HEADS, seqlen, head_dim, generator=generator) for _ in range(2))
        return x + 10.0 * far * (torch.rand(x.shape, generator=generator) < 0.001)

    return one(), one(), one()


def sinks(seqlen: int, head_dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """N(0, 1), and a first key that all queries look at, with a small value: about nine tenths of the weights; keys have a mean."""
    q, k, v = normal(seqlen, head_dim, generator)
    direction = F.normalize(torch.randn(head_dim, generator=generator), dim=0)
    q = q + 4.0 * direction
    k = k + 2.0 * torch.randn(1, HEADS, 1, head_dim, generator=generator)
    towards = (torch.tensor(9.0 * seqlen).log() + 1.0) * head_dim**0.5 / 4.0
    k[:, :, 0] = k.mean(2) + towards * direction
    v[:, :, 0] *= 0.01
    return q, k, v


INPUTS: dict[str, Callable[[int, int, torch.Generator], tuple[Tensor, Tensor, Tensor]]] = {
    "normal": normal,
    "outliers": outliers,
    "sinks": sinks,
}


def minilm() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each layer of all-MiniLM-L6-v2 with its own weights, on sentences of Python's language reference that fill the 512 tokens it
    takes: (1, 12, 512, 32). Wants the extra `[demo]`."""
    from examples.quickstart import load_minilm, sentences

    tokenizer, model = load_minilm()
    text = " ".join(sentences(64))
    length = model.config.max_position_embeddings
    tokens = tokenizer(text, truncation=True, max_length=length, return_tensors="pt")
    return fp8_training.attended(lambda: model(input_ids=tokens["input_ids"]))


# ---- measuring ------------------------------------------------------------------------------------------------------


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def attention(recipe: str, lowering: str = "reference_fp8") -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Full attention under a recipe, or in bfloat16."""
    if recipe == BASELINE:
        return _attention
    options = {"fp8_recipe": RECIPES[recipe], "lowering": lowering, "inner": "eager", "strict": True}
    compiled: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.compile(
        _attention, backend="attn_compiler", options=options, dynamic=False
    )
    return compiled


def exactly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In float64, some queries at a time: all scores of 64k positions have no room."""
    k, v = k.double(), v.double()
    return torch.cat([_attention(part.double(), k, v) for part in q.split(_QUERIES_AT_ONCE, 2)], 2)


def errors(out: Tensor, exact: Tensor) -> dict[str, float]:
    """The three measures of a Row."""
    difference = out.double() - exact
    rows = exact.square().sum(-1).mean().sqrt()
    return {
        "rmse": float(difference.square().mean().sqrt()),
        "cosine": float(F.cosine_similarity(out.double().flatten(), exact.flatten(), dim=0)),
        "worst_row": float(difference.square().sum(-1).sqrt().max() / rows),
    }


def measure(
    kind: str, seqlen: int, head_dim: int, device: str = "cpu", lowering: str = "reference_fp8"
) -> Iterator[Row]:
    """A row for bfloat16, and one for each recipe."""
    yield from of_inputs(kind, INPUTS[kind](seqlen, head_dim, torch.Generator().manual_seed(0)), device, lowering)


def of_inputs(kind: str, given: Sequence[Tensor], device: str, lowering: str) -> Iterator[Row]:
    """The same for q, k and v, (1, heads, S, D)."""
    q, k, v = (x.to(device, torch.bfloat16) for x in given)
    seqlen, head_dim = q.shape[2:]
    exact = exactly(q, k, v)
    for recipe in (BASELINE, *RECIPES):
        torch._dynamo.reset()
        out = attention(recipe, lowering)(q, k, v)
        yield Row(inputs=kind, seqlen=seqlen, head_dim=head_dim, recipe=recipe, **errors(out, exact))


def retrieve(seqlen: int, head_dim: int, device: str = "cpu", lowering: str = "reference_fp8") -> Iterator[Row]:
    """Each query asks for one of the keys, which are random and say one of 64 values: how many get the right one?

    The question is its key with noise, so that bfloat16 misses some as well.
    """
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 1, seqlen, head_dim, generator=generator)
    at = torch.randint(0, seqlen, (_NEEDLES,), generator=generator)
    noise = torch.randn(1, 1, _NEEDLES, head_dim, generator=generator)
    gain = 1.1 * torch.tensor(float(seqlen)).log() / head_dim**0.5
    questions = gain * (keys[:, :, at] + noise)
    says = torch.randint(0, _VALUES, (seqlen,), generator=generator)
    book = torch.randn(_VALUES, head_dim, generator=generator)
    q, k, v = (x.to(device, torch.bfloat16) for x in (questions, keys, book[says][None, None]))
    exact = exactly(q, k, v)
    for recipe in (BASELINE, *RECIPES):
        torch._dynamo.reset()
        out = attention(recipe, lowering)(q, k, v)
        answers = (out[0, 0].double().cpu() @ book.double().T - book.double().square().sum(-1) / 2).argmax(-1)
        found = float((answers == says[at]).double().mean())
        row = Row(
            inputs="retrieval", seqlen=seqlen, head_dim=head_dim, recipe=recipe, **errors(out, exact), found=found
        )
        yield row


# ---- output ---------------------------------------------------------------------------------------------------------


def draw(rows: Sequence[Mapping[str, Any]], output: Path) -> None:
    """RMSE by length, one field for each kind of inputs, at the largest head dim."""
    from matplotlib import pyplot

    kinds = [kind for kind in INPUTS if any(row["inputs"] == kind for row in rows)]
    if not kinds:
        raise ValueError("no row to draw")
    head_dim = max(int(row["head_dim"]) for row in rows)
    figure, every = pyplot.subplots(1, len(kinds), figsize=(5 * len(kinds), 4.2), layout="constrained", squeeze=False)
    for axes, kind in zip(every[0], kinds, strict=True):
        for recipe in (BASELINE, *RECIPES):
            own = [r for r in rows if (r["inputs"], r["recipe"], int(r["head_dim"])) == (kind, recipe, head_dim)]
            axes.plot([int(r["seqlen"]) for r in own], [float(r["rmse"]) for r in own], marker="o", label=recipe)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"{kind}, head dim {head_dim}", fontsize=10)
        axes.set_xlabel("sequence length")
        axes.spines[["top", "right"]].set_visible(False)
    every[0][0].set_ylabel("RMSE against float64 (FP8 emulated)")
    every[0][-1].legend(fontsize=8, frameon=False)
    figure.savefig(output, dpi=130)
    pyplot.close(figure)


def write(rows: Sequence[Row], output: Path) -> None:
    with output.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def _all(given: argparse.Namespace) -> Iterator[Iterator[Row]]:
    """What is asked for, a case at a time, the short ones first."""
    for length in given.seqlens:
        for kind, d in itertools.product(INPUTS, given.head_dims):
            yield measure(kind, length, d, given.device, given.lowering)
    if given.activations:
        setup = fp8_training.ON_GPU if given.device == "cuda" else fp8_training.EMULATED
        yield of_inputs("llama", fp8_training.activations(300, setup), given.device, given.lowering)
    for layer, seen in enumerate(minilm() if given.minilm else (), 1):
        yield of_inputs(f"minilm, layer {layer}", seen, given.device, given.lowering)
    for length in given.retrieval:
        yield retrieve(length, max(given.head_dims), given.device, given.lowering)


def main() -> None:
    """Measure, write the CSV and, if asked for, the picture; print a line for each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path, nargs="?")
    parser.add_argument("--seqlens", type=int, nargs="*", default=[1024, 2048, 4096])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--retrieval", type=int, nargs="*", default=[65536])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lowering", default="reference_fp8")
    parser.add_argument("--activations", action="store_true", help="those of a small model that learns first, too")
    parser.add_argument("--minilm", action="store_true", help="those of a pretrained model, too")
    given = parser.parse_args()
    rows: list[Row] = []
    for found in _all(given):
        rows.extend(found)
        write(rows, given.results)
    for row in rows:
        share = "" if row.found is None else f"  found {row.found:.3f}"
        place = f"{row.inputs:16} {row.seqlen:6} {row.head_dim:4}  {row.recipe:30}"
        print(f"{place} rmse {row.rmse:.2e}  cosine {row.cosine:.6f}  worst row {row.worst_row:.2e}{share}")
    if given.picture is not None:
        draw([asdict(row) for row in rows], given.picture)


if __name__ == "__main__":
    main()
