"""Linear attention on this machine: models' own functions compiled by Inductor, and by our backend, which takes their calls.

    python -m benchmarks.bench_linear [--only gated_delta]

Each case is one call of a function of transformers, in training, in inference or for one token on a state. Both sides run in one process
and take turns. `first_step_s` is the first call, with all compilation and empty caches. Writes benchmarks/results/linear_cpu.csv.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

import attn_compiler
from benchmarks import harness

RESULTS = Path(__file__).parent / "results" / "linear_cpu.csv"
KEYS = ("function", "batch", "length", "heads", "head_dim", "scenario")
COLUMNS = ("lowering", "rounds", "inductor_p50_ms", "attn_compiler_p50_ms", "ratio", "inductor_first_step_s")
LAST = ("attn_compiler_first_step_s", "first_step_share", "error", "numerics")
_LOWERING = "linear_reference"
_FURTHEST = 1e-3


@dataclass(frozen=True, kw_only=True)
class LinearCase:
    """scenario: "training", "inference" or "one token"."""

    function: str
    batch: int
    length: int
    heads: int
    head_dim: int
    scenario: str

    def model(self) -> nn.Module:
        """The function as a module whose parameters are the operands, so that all of them have a gradient."""
        return _Calls(self)


_DELTA = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
_CHANNEL = "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"
_STATE_SPACE = "mamba2_chunk_scan", "mamba2_selective_state_update"
_FUNCTIONS: Mapping[str, tuple[str, tuple[str, str]]] = {
    "gated_delta": ("qwen3_next", _DELTA),
    "state_space": ("bamba", _STATE_SPACE),
    "channel_delta": ("kimi_linear", _CHANNEL),
}


class _Calls(nn.Module):
    def __init__(self, case: LinearCase) -> None:
        super().__init__()
        model, (many, one) = _FUNCTIONS[case.function]
        module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        is_one = case.scenario == "one token"
        self.run: Callable[..., Any] = getattr(module, one if is_one else many)
        self.case = case
        tokens, heads, dim = (case.batch, 1 if is_one else case.length), case.heads, case.head_dim
        torch.manual_seed(0)
        made = {"q": torch.randn(*tokens, heads, dim), "k": torch.randn(*tokens, heads, dim)}
        made |= {"v": torch.randn(*tokens, heads, dim), "g": -F.softplus(torch.randn(*tokens, heads))}
        if case.function == "channel_delta":
            made["g"] = -F.softplus(torch.randn(*tokens, heads, dim))
        made |= {"beta": torch.rand(*tokens, heads), "A": -torch.rand(heads), "D": torch.randn(heads)}
        self.given = nn.ParameterDict({name: nn.Parameter(x) for name, x in made.items()})
        self.register_buffer("state", torch.zeros(case.batch, heads, dim, dim))

    def forward(self) -> Tensor:
        x, is_one = self.given, self.case.scenario == "one token"
        if self.case.function == "state_space":
            return self._state_space(is_one)
        state = {"initial_state": self.state if is_one else None, "output_final_state": is_one}
        out, last = self.run(x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], use_qk_l2norm_in_kernel=True, **state)
        if last is not None:
            self.state.copy_(last)
        return out  # type: ignore[no-any-return]

    def _state_space(self, is_one: bool) -> Tensor:
        x, dim = self.given, self.case.head_dim
        if not is_one:
            return self.run(x["v"], x["beta"], x["A"], x["k"], x["q"], chunk_size=256, D=x["D"], dt_softplus=True)  # type: ignore[no-any-return]
        spread = x["beta"][:, 0, :, None].expand(-1, -1, dim), x["A"][:, None, None].expand(-1, dim, dim)
        more = {"D": x["D"][:, None].expand(-1, dim), "dt_softplus": True}
        return self.run(self.state, x["v"][:, 0], *spread, x["k"][:, 0], x["q"][:, 0], **more)  # type: ignore[no-any-return]


def cases() -> Iterator[LinearCase]:
    """Tiny heads, where the host's time counts, and those of models."""
    for function in _FUNCTIONS:
        for heads, head_dim in ((4, 16), (4, 128)):
            size = {"function": function, "batch": 1, "heads": heads, "head_dim": head_dim}
            yield LinearCase(**size, length=1, scenario="one token")  # type: ignore[arg-type]
            lengths = (64, 512) if function == "channel_delta" else (64, 512, 2048)
            for length in lengths:
                for scenario in ("inference", "training"):
                    yield LinearCase(**size, length=length, scenario=scenario)  # type: ignore[arg-type]


def measure(case: LinearCase, seconds: float) -> dict[str, str]:
    """Both sides of a case."""
    steps: dict[str, harness.Step] = {}
    first: dict[str, float] = {}
    outs: dict[str, Tensor] = {}
    attn_compiler.reset()
    for side, settings in (("inductor", {}), ("attn_compiler", {"options": {"lowering": _LOWERING, "strict": True}})):
        torch._dynamo.reset()
        compiled = torch.compile(case.model(), backend=side, dynamic=False, **settings)
        steps[side] = harness.make_step(compiled, {}, training=case.scenario == "training")
        start = time.perf_counter()
        with fresh_cache():
            outs[side] = steps[side]().detach().clone()
        first[side] = time.perf_counter() - start
    taken = [one.decision.lowering for report in attn_compiler.reports() for one in report.linear]
    times = harness.interleave(steps, "cpu", seconds=seconds)
    error = float((outs["attn_compiler"] - outs["inductor"]).abs().max() / outs["inductor"].abs().max())
    p50 = {side: harness.percentiles(values)[1] for side, values in times.items()}
    return {
        "lowering": ", ".join(taken) or "none",
        "rounds": str(len(times["inductor"])),
        **{f"{side}_p50_ms": f"{value:.4g}" for side, value in p50.items()},
        "ratio": f"{harness.ratio(times['inductor'], times['attn_compiler']):.3f}",
        **{f"{side}_first_step_s": f"{value:.3g}" for side, value in first.items()},
        "first_step_share": f"{first['attn_compiler'] / first['inductor']:.3f}",
        "error": f"{error:.2g}",
        "numerics": "ok" if error < _FURTHEST and taken else "WRONG",
    }


def main() -> int:
    """Measure every case; 0 where none is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="timing of one case (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="cases of this function")
    parser.add_argument("--head-dim", type=int, default=0, help="cases of this size")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of the longest case (default %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    where = harness.environment("cpu")
    file = harness.CsvFile(options.output, [*KEYS, *COLUMNS, *LAST, *where])
    for case in cases():
        if (
            options.only not in case.function
            or options.head_dim not in (0, case.head_dim)
            or case.length > options.longest
        ):
            continue
        names = {name: str(getattr(case, name)) for name in KEYS}
        row = measure(case, options.seconds)
        file.add({**names, **row, **where})
        harness.print_table(file.rows[-1:], (*KEYS, "ratio", "first_step_share", "error"))
    return harness.failures(file.rows)


if __name__ == "__main__":
    sys.exit(main())
