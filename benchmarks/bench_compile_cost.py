"""What our passes cost: their share in the whole time of torch.compile, and their seconds alone, forward and training step.

    python -m benchmarks.bench_compile_cost
    python -m benchmarks.bench_compile_cost --models llama gemma3 deepseek_v3 t5 bert --passes-alone --output passes.csv
    python -m benchmarks.bench_compile_cost --models llama bert --passes-alone --sizes known automatic dynamic --scenarios train_padded

Cold is a compilation with empty caches. Warm repeats it with filled ones, as a second start of the same program would: what our passes made
is done again, and so is most of what Inductor made. With --passes-alone nothing is compiled after our passes: a row has the round of three
that took the least CPU time, once with the passes run ("none") and once with what they made done again ("kept"). --sizes: of what is
compiled. "automatic" is the second length of a model, which Dynamo makes a symbol; "dynamic" is a first one under `dynamic=True`, where the
batch and each float that a module holds are symbols, too. Widths are tiny, since what passes cost goes by nodes. Exits with 1 where a share
is above its limit.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import transformers

import attn_compiler
from attn_compiler import passes as passes_package
from benchmarks import harness
from benchmarks.harness import Bench, Row, Step, arg
from benchmarks.models import SCENARIOS

#: by caches
MAX_SHARE = {"cold": 0.03, "warm": 0.10}
ROUNDS = 3
_RECURSION_LIMIT = sys.getrecursionlimit()
COLUMNS = (
    *("model", "layers", "scenario", "sizes", "caches", "implementation"),
    *("total_seconds", "passes_seconds", "passes_cpu_seconds", "share", "by_pass"),
)
_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "vocab_size": 256}
#: a configuration and its arguments, a model and its own, and what says how many layers
MODELS: Mapping[str, tuple[str, dict[str, Any], str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("LlamaConfig", _SIZES | {"num_key_value_heads": 2}, "LlamaModel", {}, ("num_hidden_layers",)),
    "gemma3": (
        *("Gemma3TextConfig", _SIZES | {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16}),
        *("Gemma3TextModel", {}, ("num_hidden_layers",)),
    ),
    # Without experts, whose loops break the graph.
    "deepseek_v3": (
        *("DeepseekV3Config", _SIZES | _LATENT | {"num_key_value_heads": 4}),
        *("DeepseekV3Model", {}, ("num_hidden_layers", "first_k_dense_replace")),
    ),
    "t5": ("T5Config", _T5, "T5EncoderModel", {}, ("num_layers",)),
    "bert": ("BertConfig", _SIZES, "BertModel", {"add_pooling_layer": False}, ("num_hidden_layers",)),
}


def build(name: str, layers: int, implementation: str) -> torch.nn.Module:
    """One of MODELS."""
    config, sizes, model, further, per_layer = MODELS[name]
    made = getattr(transformers, config)(**sizes, **dict.fromkeys(per_layer, layers))
    made._attn_implementation = implementation
    found: torch.nn.Module = getattr(transformers, model)(made, **further)
    return found


#: by what a model is compiled with: what torch.compile is told of sizes
SIZES = {"known": False, "automatic": None, "dynamic": True}
#: of the first call, and of the second where that is the one that is measured
LENGTHS = (64, 48)


@dataclass(frozen=True, kw_only=True)
class Compilation(harness.Named):
    """sizes: a key of SIZES."""

    model: str
    layers: int
    scenario: str
    sizes: str
    implementation: str


def compiled(case: Compilation, *, alone: bool, cached: bool = True) -> dict[str, str]:
    """One compilation: the first call's seconds less a later call's, and our passes' own seconds from the reports.

    alone: nothing is compiled after our passes, so there is no whole to have a share in. cached: what the passes make is kept.
    """
    torch.compiler.reset()
    attn_compiler.reset()
    # Inductor raises it, and it is part of the key of what is kept: a second start of a program has it as the first one had.
    sys.setrecursionlimit(_RECURSION_LIMIT)
    torch.manual_seed(0)
    training, padded = SCENARIOS[case.scenario].training, SCENARIOS[case.scenario].padded
    model = build(case.model, case.layers, case.implementation).train(training)
    options = {"inner": "eager" if alone else "inductor", "cache_rewrites": cached}
    run = torch.compile(model, backend=harness.BACKEND, options=options, dynamic=SIZES[case.sizes])
    steps = [harness.make_step(run, _inputs(case.model, n, padded=padded), training=training) for n in LENGTHS]
    if case.sizes == "automatic":
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
        **case.names,
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


def measure(case: Compilation, given: Namespace) -> Iterator[Row]:
    """A cold compilation, and a warm one after it. With the passes alone: the shortest of some rounds with them, and of some that find what
    they made; what else a machine does only adds to them."""
    with tempfile.TemporaryDirectory() as caches, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=caches):
        if not given.passes_alone:
            for state in ("cold", "warm"):
                yield {**compiled(case, alone=False), "caches": state}
            return
        ran = [compiled(case, alone=True, cached=False) for _ in range(ROUNDS)]
        # The first one fills the cache.
        found = [compiled(case, alone=True) for _ in range(1 + ROUNDS)][1:]
    for rows, state in ((ran, "none"), (found, "kept")):
        yield {**min(rows, key=lambda row: float(row["passes_cpu_seconds"])), "caches": state}


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


def is_dear(row: Row) -> bool:
    """Whether a share is above its limit."""
    return bool(row["share"]) and float(row["share"]) > MAX_SHARE[row["caches"]]


BENCH = Bench(
    doc=__doc__, results="compile_cost.csv", columns=COLUMNS, measure=measure, again=True, devices=("cpu",),
    cases=lambda given: [
        Compilation(model=model, layers=given.layers, scenario=scenario, sizes=sizes, implementation=implementation)
        for model in given.models for implementation in given.implementations for scenario in given.scenarios
        for sizes in given.sizes
    ],
    table=lambda rows: print("a share is above its limit" if any(map(is_dear, rows)) else "no share is above its limit"),
    failed=lambda rows: any(map(is_dear, rows)),
    options=(
        arg("--models", nargs="+", default=["llama"], choices=sorted(MODELS)),
        arg("--layers", type=int, default=32),
        arg("--implementations", nargs="+", default=["sdpa", "eager"]),
        arg("--scenarios", nargs="+", default=["prefill", "train"]),
        arg("--sizes", nargs="+", default=["known"], choices=list(SIZES)),
        arg("--passes-alone", action="store_true"),
    ),
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
