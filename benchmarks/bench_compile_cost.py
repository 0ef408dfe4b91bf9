"""What our passes cost: their share in the whole time of torch.compile, and their seconds alone, forward and training step.

    python -m benchmarks.bench_compile_cost
    python -m benchmarks.bench_compile_cost --models llama gemma3 deepseek_v3 t5 bert --passes-alone --output passes.csv
    python -m benchmarks.bench_compile_cost --models llama bert --passes-alone --sizes known automatic dynamic --scenarios train_padded

Cold is a compilation with empty caches. Warm repeats it with filled ones, as a second start of the same program would: what our passes
made is done again, and so is most of what Inductor made. With --passes-alone nothing is compiled after our passes: a row has
the round of three that took the least CPU time, once with the passes run ("none") and once with what they made done again ("kept").
--sizes: of what is compiled. "automatic" is the second length of a model, which Dynamo makes a symbol; "dynamic" is a first one under
`dynamic=True`, where the batch and each float that a module holds are symbols, too.
Widths are tiny, since what passes cost goes by nodes.
Writes benchmarks/results/compile_cost.csv. Exits with 1 where a share is above its limit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

import attn_compiler
from attn_compiler import passes as passes_package
from benchmarks import harness
from benchmarks.harness import Step
from benchmarks.inputs import SCENARIOS

RESULTS = Path(__file__).parent / "results" / "compile_cost.csv"
#: by caches
MAX_SHARE = {"cold": 0.03, "warm": 0.10}
ROUNDS = 3
_RECURSION_LIMIT = sys.getrecursionlimit()
COLUMNS = (
    "model",
    "layers",
    "scenario",
    "sizes",
    "caches",
    "implementation",
    "total_seconds",
    "passes_seconds",
    "passes_cpu_seconds",
    "share",
    "by_pass",
)


def _llama(layers: int, implementation: str) -> torch.nn.Module:
    return transformers.LlamaModel(_config(transformers.LlamaConfig, layers, implementation, num_key_value_heads=2))


def _gemma3(layers: int, implementation: str) -> torch.nn.Module:
    return transformers.Gemma3TextModel(
        _config(
            transformers.Gemma3TextConfig,
            layers,
            implementation,
            num_key_value_heads=2,
            head_dim=16,
            sliding_window=16,
        )
    )


def _deepseek_v3(layers: int, implementation: str) -> torch.nn.Module:
    """Without experts, whose loops break the graph."""
    return transformers.DeepseekV3Model(
        _config(
            transformers.DeepseekV3Config,
            layers,
            implementation,
            num_key_value_heads=4,
            kv_lora_rank=16,
            q_lora_rank=32,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
            first_k_dense_replace=layers,
        )
    )


def _t5(layers: int, implementation: str) -> torch.nn.Module:
    config = transformers.T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=layers, num_heads=4, vocab_size=256)
    config._attn_implementation = implementation
    return transformers.T5EncoderModel(config)


def _bert(layers: int, implementation: str) -> torch.nn.Module:
    return transformers.BertModel(_config(transformers.BertConfig, layers, implementation), add_pooling_layer=False)


def _config(config: Callable[..., Any], layers: int, implementation: str, **more: int) -> Any:
    return config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=256,
        attn_implementation=implementation,
        **more,
    )


MODELS: dict[str, Callable[[int, str], torch.nn.Module]] = {
    "llama": _llama,
    "gemma3": _gemma3,
    "deepseek_v3": _deepseek_v3,
    "t5": _t5,
    "bert": _bert,
}


#: by what a model is compiled with: what torch.compile is told of sizes
SIZES = {"known": False, "automatic": None, "dynamic": True}
#: of the first call, and of the second where that is the one that is measured
LENGTHS = (64, 48)


def measure(
    name: str, layers: int, scenario: str, implementation: str, sizes: str, *, alone: bool, cached: bool = True
) -> dict[str, str]:
    """One compilation: the first call's seconds less a later call's, and our passes' own seconds from the reports.

    sizes: a key of SIZES. alone: nothing is compiled after our passes, so there is no whole to have a share in.
    cached: what the passes make is kept, and looked up.
    """
    torch.compiler.reset()
    attn_compiler.reset()
    # Inductor raises it, and it is part of the key of what is kept: a second start of a program has it as the first one had.
    sys.setrecursionlimit(_RECURSION_LIMIT)
    torch.manual_seed(0)
    training, padded = SCENARIOS[scenario].training, SCENARIOS[scenario].padded
    model = MODELS[name](layers, implementation).train(training)
    options = {"inner": "eager" if alone else "inductor", "cache_rewrites": cached}
    compiled = torch.compile(model, backend=harness.BACKEND, options=options, dynamic=SIZES[sizes])
    steps = [harness.make_step(compiled, _inputs(name, length, padded=padded), training=training) for length in LENGTHS]
    if sizes == "automatic":
        _seconds(steps.pop(0))
        attn_compiler.reset()
    step = steps[0]
    with _cpu_seconds_of_passes() as cpu:
        first, later = (_seconds(step) for _ in range(2))
    by_pass = Counter[str]()
    for report in attn_compiler.reports():
        by_pass.update(dict(report.seconds))
    passes, total = sum(by_pass.values()), first - later
    return {
        "model": name,
        "layers": str(layers),
        "scenario": scenario,
        "sizes": sizes,
        "implementation": implementation,
        "total_seconds": "" if alone else f"{total:.2f}",
        "passes_seconds": f"{passes:.3f}",
        "passes_cpu_seconds": f"{sum(cpu):.3f}",
        "share": "" if alone else f"{passes / total:.4f}",
        "by_pass": " ".join(f"{name}={seconds:.3f}" for name, seconds in by_pass.most_common()),
    }


def _inputs(name: str, length: int, *, padded: bool) -> dict[str, Any]:
    """Two rows; padded: the second is a quarter shorter."""
    ids = torch.arange(2 * length).view(2, length)
    inputs: dict[str, Any] = {"input_ids": ids} if name in ("t5", "bert") else {"input_ids": ids, "use_cache": False}
    if padded:
        inputs["attention_mask"] = torch.ones_like(ids).index_fill(1, torch.arange(length * 3 // 4, length), 0)
        inputs["attention_mask"][0] = 1
    return inputs


def passes_alone(name: str, layers: int, scenario: str, implementation: str, sizes: str) -> list[dict[str, str]]:
    """The shortest of some rounds with the passes, and of some that find what they made: what else a machine does only adds to them."""
    case = (name, layers, scenario, implementation, sizes)
    with _own_caches():
        ran = [measure(*case, alone=True, cached=False) for _ in range(ROUNDS)]
        # The first one fills the cache.
        found = [measure(*case, alone=True) for _ in range(1 + ROUNDS)][1:]
    return [{**_shortest(rows), "caches": caches} for rows, caches in ((ran, "none"), (found, "kept"))]


def _shortest(rows: list[dict[str, str]]) -> dict[str, str]:
    return min(rows, key=lambda row: float(row["passes_cpu_seconds"]))


@contextlib.contextmanager
def _own_caches() -> Iterator[None]:
    """Caches that are empty, and go when the block ends."""
    with tempfile.TemporaryDirectory() as caches, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=caches):
        yield


def with_caches(name: str, layers: int, scenario: str, implementation: str, sizes: str) -> list[dict[str, str]]:
    """A cold compilation, and a warm one after it."""
    with _own_caches():
        return [
            {**measure(name, layers, scenario, implementation, sizes, alone=False), "caches": state}
            for state in ("cold", "warm")
        ]


@contextlib.contextmanager
def _cpu_seconds_of_passes() -> Iterator[list[float]]:
    """Filled in with the CPU time that the passes take for each graph: other work on the machine is no part of it."""
    found: list[float] = []
    rewrite = passes_package.rewrite

    def timed(*args: Any, **kwargs: Any) -> passes_package.Rewritten:
        start = time.process_time()
        try:
            return rewrite(*args, **kwargs)
        finally:
            found.append(time.process_time() - start)

    with mock.patch.object(passes_package, "rewrite", timed):
        yield found


def _seconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> int:
    """Measure, print and write; 0 where every share is within its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama"], choices=sorted(MODELS))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--implementations", nargs="+", default=["sdpa", "eager"])
    parser.add_argument("--scenarios", nargs="+", default=["prefill", "train"])
    parser.add_argument("--sizes", nargs="+", default=["known"], choices=list(SIZES))
    parser.add_argument("--passes-alone", action="store_true")
    harness.add_output(parser, RESULTS)
    options = parser.parse_args()

    file, where = harness.opened(options, COLUMNS, "cpu")
    too_dear = False
    for name in options.models:
        for implementation in options.implementations:
            for scenario in options.scenarios:
                for sizes in options.sizes:
                    case = (name, options.layers, scenario, implementation, sizes)
                    for row in passes_alone(*case) if options.passes_alone else with_caches(*case):
                        file.add({**row, **where})
                        print(_line(row), flush=True)
                        too_dear |= bool(row["share"]) and float(row["share"]) > MAX_SHARE[row["caches"]]
    print("a share is above its limit" if too_dear else "every share is within its limit")
    return int(too_dear)


def _line(row: dict[str, str]) -> str:
    whole = f" of {row['total_seconds']} s, {float(row['share']):.1%}" if row["share"] else " s"
    what = (
        f"{row['layers']} layers of {row['model']}, {row['implementation']}, {row['scenario']}, "
        f"{row['sizes']} sizes, {row['caches']} caches"
    )
    return f"{what}: {row['passes_seconds']}{whole} ({row['by_pass']})"


if __name__ == "__main__":
    sys.exit(main())
