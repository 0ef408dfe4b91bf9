"""A small Llama learns the standard library's documentation, its attention in bfloat16 and in FP8: both losses, step by step.

    python -m benchmarks.fp8_training benchmarks/results/fp8_training.csv docs/fp8_training.png

Emulated, as in fp8_accuracy.py: what is compared is what rounding does to learning, not time. Wants transformers, and matplotlib for
the picture.
"""

from __future__ import annotations

import argparse
import csv
import functools
import pydoc_data.topics
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from attn_compiler import CurrentScaling, DelayedScaling, Fp8Recipe

BASELINE = "bfloat16"
RECIPES = {
    "current": Fp8Recipe(),
    "delayed": Fp8Recipe(scaling=DelayedScaling()),
    "accurate": Fp8Recipe(scaling=CurrentScaling(granularity="block"), smooth_k=True, hadamard=True),
}
STEPS, BATCH, LENGTH = 600, 8, 64
# A larger one takes two runs apart by more than rounding does, whatever it is that rounds one of them.
LEARNING_RATE = 1e-3
#: steps that a loss is the mean of
WINDOW = 20


@functools.cache
def text() -> Tensor:
    """`pydoc`'s topics, in bytes."""
    joined = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return torch.tensor(list(joined.encode()))


def batch(step: int) -> Tensor:
    """int64 (BATCH, LENGTH), the same in every run."""
    starts = torch.randint(0, len(text()) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text()[start : start + LENGTH] for start in starts])


def losses(recipe: Fp8Recipe | None, steps: int = STEPS) -> list[float]:
    """Of each step; the model's attention is in bfloat16 by autocast, or in FP8."""
    import transformers

    torch._dynamo.reset()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
    )
    model = transformers.LlamaForCausalLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    lowering = "untouched" if recipe is None else "reference_fp8"
    options = {"fp8_recipe": recipe, "lowering": lowering, "inner": "aot_eager", "strict": True}
    function = torch.compile(model, backend="attn_compiler", options=options, fullgraph=True)
    found = []
    for step in range(steps):
        tokens = batch(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = function(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        found.append(float(loss.detach()))
    return found


def last(found: Sequence[float]) -> float:
    """Where a run ended."""
    return sum(found[-WINDOW:]) / WINDOW


def draw(runs: Mapping[str, Sequence[float]], output: Path) -> None:
    """Each run's loss, and below it how far it is from the baseline's; means of WINDOW steps."""
    from matplotlib import pyplot

    means = {name: torch.tensor(found).unfold(0, WINDOW, 1).mean(1) for name, found in runs.items()}
    figure, (upper, lower) = pyplot.subplots(
        2, 1, figsize=(8, 6), layout="constrained", sharex=True, height_ratios=[2, 1]
    )
    for name, values in means.items():
        steps = range(WINDOW, WINDOW + len(values))
        upper.plot(steps, values, label=name, linewidth=1.2)
        if name != BASELINE:
            lower.plot(steps, 100 * (values / means[BASELINE] - 1), label=name, color=upper.lines[-1].get_color())
    upper.set_ylabel(f"loss, mean of {WINDOW} steps")
    upper.legend(frameon=False)
    lower.axhspan(-1, 1, color="0.9")
    lower.set_ylabel(f"% above {BASELINE}")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=130)
    pyplot.close(figure)


def write(runs: Mapping[str, Sequence[float]], output: Path) -> None:
    with output.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *runs])
        writer.writerows(
            [step, *(f"{x:.6g}" for x in row)] for step, row in enumerate(zip(*runs.values(), strict=True))
        )


def main() -> None:
    """Train, write the CSV and, if asked for, the picture; print where each run ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path, nargs="?")
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    runs = {BASELINE: losses(None, given.steps)}
    for name, recipe in RECIPES.items():
        runs[name] = losses(recipe, given.steps)
    for name, found in runs.items():
        share = 100 * (last(found) / last(runs[BASELINE]) - 1)
        print(f"{name:10} {last(found):.4f}  {share:+.2f}%")
    write(runs, given.results)
    if given.picture is not None:
        draw(runs, given.picture)


if __name__ == "__main__":
    main()
