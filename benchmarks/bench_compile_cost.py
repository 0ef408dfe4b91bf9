"""What our passes cost: their share in the whole time of torch.compile, for a 32-layer Llama, forward and training step.

    python -m benchmarks.bench_compile_cost

Cold is a compilation with empty caches, which the limit of 10% is for. Warm repeats it with Inductor's caches filled, as a second
start of the same program would: our passes run again, most of Inductor does not, so the share is larger and is only shown.
Writes benchmarks/results/compile_cost.csv. Exits with 1 where a cold share is above the limit.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import transformers

import attn_compiler
from benchmarks import harness
from benchmarks.harness import Step
from benchmarks.inputs import SCENARIOS

RESULTS = Path(__file__).parent / "results" / "compile_cost.csv"
MAX_SHARE = 0.10
COLUMNS = ("layers", "scenario", "caches", "implementation", "total_seconds", "passes_seconds", "share", "by_pass")


def measure(layers: int, scenario: str, implementation: str) -> dict[str, str]:
    """One compilation: the first call's seconds less a later call's, and our passes' own seconds from the reports."""
    torch.compiler.reset()
    attn_compiler.reset()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        attn_implementation=implementation,
    )
    training = SCENARIOS[scenario].training
    model = transformers.LlamaModel(config).train(training)
    compiled = torch.compile(model, backend=harness.BACKEND)
    ids = {"input_ids": torch.arange(64)[None, :], "use_cache": False}
    step = harness.make_step(compiled, ids, training=training)
    first, later = (_seconds(step) for _ in range(2))
    by_pass = Counter[str]()
    for report in attn_compiler.reports():
        by_pass.update(dict(report.seconds))
    passes, total = sum(by_pass.values()), first - later
    return {
        "layers": str(layers),
        "scenario": scenario,
        "implementation": implementation,
        "total_seconds": f"{total:.2f}",
        "passes_seconds": f"{passes:.3f}",
        "share": f"{passes / total:.4f}",
        "by_pass": " ".join(f"{name}={seconds:.3f}" for name, seconds in by_pass.most_common()),
    }


def _seconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> int:
    """Measure, print and write; 0 where every cold share is within the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--implementations", nargs="+", default=["sdpa", "eager"])
    parser.add_argument("--scenarios", nargs="+", default=["prefill", "train"])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="the commit to name in the rows, where this is no checkout")
    options = parser.parse_args()

    where = harness.environment("cpu", options.commit)
    file = harness.CsvFile(options.output, [*COLUMNS, *where])
    too_dear = False
    for implementation in options.implementations:
        for scenario in options.scenarios:
            with tempfile.TemporaryDirectory() as caches:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = caches
                for state in ("cold", "warm"):
                    row = {**measure(options.layers, scenario, implementation), "caches": state}
                    file.add({**row, **where})
                    print(
                        f"{row['layers']} layers, {implementation}, {scenario}, {state} caches: "
                        f"{row['passes_seconds']} of {row['total_seconds']} s, {float(row['share']):.1%} ({row['by_pass']})",
                        flush=True,
                    )
                    too_dear |= state == "cold" and float(row["share"]) > MAX_SHARE
    print(f"limit for cold caches: {MAX_SHARE:.0%}:", "exceeded" if too_dear else "kept")
    return int(too_dear)


if __name__ == "__main__":
    sys.exit(main())
