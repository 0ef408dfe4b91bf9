"""A small Llama learns the standard library's documentation, its attention in bfloat16 and in FP8: both losses, step by step.

    python -m benchmarks.fp8_training benchmarks/results/fp8_training.csv docs/fp8_training.png

Emulated on a CPU, as in fp8_accuracy.py; fp8_learning.py runs the kernels, on a larger model and other text, several times each. What is
compared is what rounding does to learning, not time. Wants transformers, and matplotlib for the picture.
"""

from __future__ import annotations

import argparse
import csv
import functools
import multiprocessing
import pydoc_data.topics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from attn_compiler import DelayedScaling, Fp8Recipe

BASELINE = "bfloat16"
RECIPES = {
    "current": Fp8Recipe(),
    "delayed": Fp8Recipe(scaling=DelayedScaling()),
    "accurate": Fp8Recipe(smooth_k=True, hadamard=True, qk_format="int8"),
}
STEPS = 600
# A larger one takes two runs apart by more than rounding does, whatever it is that rounds one of them.
LEARNING_RATE = 1e-3
#: steps that a loss is the mean of
WINDOW = 20


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model and where it runs. lowering: of FP8; inner: what compiles the rest. length: bytes of one text."""

    device: str = "cpu"
    lowering: str = "reference_fp8"
    inner: str = "aot_eager"
    hidden: int = 64
    layers: int = 2
    heads: int = 2
    heads_kv: int = 1
    batch: int = 8
    length: int = 64

    def model(self, seed: int = 0) -> Any:
        """The same weights each time."""
        import transformers

        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=self.hidden,
            intermediate_size=2 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads_kv,
            max_position_embeddings=self.length,
        )
        return transformers.LlamaForCausalLM(config).to(self.device)


EMULATED = Setup()
#: what learns activations for fp8_accuracy.py and fp8_gradients.py
ON_GPU = Setup(
    device="cuda",
    lowering="hopper_fp8",
    inner="inductor",
    hidden=512,
    layers=4,
    heads=4,
    heads_kv=2,
    batch=8,
    length=1024,
)


@functools.cache
def text() -> Tensor:
    """`pydoc`'s topics, in bytes."""
    joined = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return torch.tensor(list(joined.encode()))


def batch(step: int, setup: Setup = EMULATED) -> Tensor:
    """int64 (batch, length), the same in every run."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text()) - setup.length, (setup.batch,), generator=generator)
    return torch.stack([text()[start : start + setup.length] for start in starts]).to(setup.device)


def losses(recipe: Fp8Recipe | None, steps: int = STEPS, setup: Setup = EMULATED) -> list[float]:
    """Of each step; the model's attention is in bfloat16 by autocast, or in FP8."""
    torch._dynamo.reset()
    lowering = "untouched" if recipe is None else setup.lowering
    options = {"fp8_recipe": recipe, "lowering": lowering, "inner": setup.inner, "strict": True}
    model = setup.model()
    function = torch.compile(model, backend="attn_compiler", options=options, fullgraph=True)
    return learn(model, function, steps, setup)


def learn(model: Any, function: Any, steps: int, setup: Setup) -> list[float]:
    """The losses of training a model in place. function: the model, or what was compiled of it."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    found = []
    for step in range(steps):
        tokens = batch(step, setup)
        with torch.autocast(setup.device, torch.bfloat16):
            loss = function(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        found.append(loss.detach())
    return [float(loss) for loss in found]


def activations(steps: int, setup: Setup) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the last layer of a model that has learnt so many steps, for a text: (1, heads, length, D), as it attends to them."""
    model = setup.model()
    learn(model, model, steps, setup)
    with torch.autocast(setup.device, torch.bfloat16):
        return attended(lambda: model(input_ids=batch(steps, setup)[:1], use_cache=False))[-1]


def attended(run: Callable[[], Any]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k and v of each SDPA call of a model, in their order: float32 (B, Hq, S, D), with k and v for each head of q."""
    attend = torch.nn.functional.scaled_dot_product_attention
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def noted(q: Tensor, k: Tensor, v: Tensor, *further: Any, **named: Any) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k_of_each, v_of_each = (x.repeat_interleave(groups, 1).float().cpu() for x in (k, v))
        seen.append((q.float().cpu(), k_of_each, v_of_each))
        return attend(q, k, v, *further, **named)

    with torch.no_grad(), mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", noted):
        run()
    return seen


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
    parser.add_argument("--jobs", type=int, default=1, help="so many runs at a time (%(default)s)")
    given = parser.parse_args()
    recipes: dict[str, Fp8Recipe | None] = {BASELINE: None, **RECIPES}
    with ProcessPoolExecutor(given.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {name: pool.submit(losses, recipe, given.steps) for name, recipe in recipes.items()}
        runs = {name: future.result() for name, future in futures.items()}
    for name, found in runs.items():
        share = 100 * (last(found) / last(runs[BASELINE]) - 1)
        print(f"{name:10} {last(found):.4f}  {share:+.2f}%")
    write(runs, given.results)
    if given.picture is not None:
        draw(runs, given.picture)


if __name__ == "__main__":
    main()
