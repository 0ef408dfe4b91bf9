"""Linear attention on this machine: models' own functions compiled by Inductor, and by our backend, which takes their calls.

    python -m benchmarks.bench_linear [--only gated_delta]

Each case is one call of a function of transformers, in training, in inference or for one token on a state. Both sides run in one process
and take turns. `first_step_s` is the first call, with all compilation and empty caches.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache

import attn_compiler
from benchmarks import harness
from benchmarks.harness import Bench, Row, arg
from benchmarks.linear_layers import LAYERS, LinearLayer

KEYS = ("function", "batch", "length", "heads", "head_dim", "scenario")
COLUMNS = (
    *(*KEYS, "lowering", "rounds", "inductor_p50_ms", "attn_compiler_p50_ms", "ratio", "inductor_first_step_s"),
    *("attn_compiler_first_step_s", "first_step_share", "error", "numerics"),
)
SIDES = {"inductor": {}, "attn_compiler": {"options": {"lowering": "linear_reference", "strict": True}}}
_FURTHEST = 1e-3
#: the layer that a function is of
_LAYERS = {"gated_delta": "qwen3_next", "state_space": "bamba", "channel_delta": "kimi_linear"}


@dataclass(frozen=True, kw_only=True)
class LinearCase(harness.Named):
    """scenario: "training", "inference" or "one token"."""

    function: str
    batch: int = 1
    length: int
    heads: int
    head_dim: int
    scenario: str

    def model(self) -> LinearLayer:
        sizes = {"groups": self.heads, "heads": self.heads, "dim_k": self.head_dim, "dim_v": self.head_dim}
        heads = dataclasses.replace(LAYERS[_LAYERS[self.function]], **sizes)
        is_one = self.scenario == "one token"
        layer = LinearLayer(heads, self.batch, self.length, torch.float32, "cpu", is_one=is_one, gives_state=is_one)
        layer.given.pop("dt_bias") if layer.is_ssd else None
        return layer


def cases(given: Namespace) -> Iterator[LinearCase]:
    """Tiny heads, where the host's time counts, and those of models."""
    for function in (name for name in _LAYERS if given.only in name):
        for head_dim in (dim for dim in (16, 128) if given.head_dim in (0, dim)):
            size = {"function": function, "heads": 4, "head_dim": head_dim}
            yield LinearCase(**size, length=1, scenario="one token")
            for length in (64, 512) if function == "channel_delta" else (64, 512, 2048):
                if length <= given.longest:
                    for scenario in ("inference", "training"):
                        yield LinearCase(**size, length=length, scenario=scenario)


def measure(case: LinearCase, given: Namespace) -> Iterator[Row]:
    """Both sides of a case."""
    steps: dict[str, harness.Step] = {}
    first: dict[str, float] = {}
    outs: dict[str, Tensor] = {}
    attn_compiler.reset()
    for side, settings in SIDES.items():
        torch._dynamo.reset()
        compiled = torch.compile(case.model(), backend=side, dynamic=False, **settings)
        steps[side] = harness.make_step(compiled, {}, training=case.scenario == "training")
        start = time.perf_counter()
        with fresh_cache():
            outs[side] = steps[side]().detach().clone()
        first[side] = time.perf_counter() - start
    taken = [one.decision.lowering for report in attn_compiler.reports() for one in report.linear]
    times = harness.interleave(steps, "cpu", seconds=given.seconds)
    error = float((outs["attn_compiler"] - outs["inductor"]).abs().max() / outs["inductor"].abs().max())
    yield {
        **case.names,
        "lowering": ", ".join(taken) or "none",
        "rounds": str(len(times["inductor"])),
        **{f"{side}_p50_ms": f"{harness.percentiles(values)[1]:.4g}" for side, values in times.items()},
        "ratio": f"{harness.ratio(times['inductor'], times['attn_compiler']):.3f}",
        **{f"{side}_first_step_s": f"{value:.3g}" for side, value in first.items()},
        "first_step_share": f"{first['attn_compiler'] / first['inductor']:.3f}",
        "error": f"{error:.2g}",
        "numerics": "ok" if error < _FURTHEST and taken else "WRONG",
    }


BENCH = Bench(
    doc=__doc__, results="linear_cpu.csv", columns=COLUMNS, cases=cases, measure=measure, sides=SIDES, devices=("cpu",),
    seconds=4.0, short=(*KEYS, "ratio", "first_step_share", "error", "numerics"),
    begin=lambda given: torch.set_num_threads(given.threads),
    table=lambda rows: harness.print_table(rows, (*KEYS, "first_step_share", "error")), failed=harness.failures,
    options=(
        arg("--threads", type=int, default=1),
        arg("--only", default="", help="cases of this function"),
        arg("--head-dim", type=int, default=0, help="cases of this size"),
        arg("--longest", type=int, default=2048, help="tokens of the longest case (default %(default)s)"),
    ),
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
