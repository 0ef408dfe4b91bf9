"""On a GPU, whole decoding steps: 8-layer Llama- and Qwen3-like models with a static cache, our backend beside Inductor's own.

    pip install --no-deps --no-build-isolation -e .
    python -m benchmarks.bench_decode_models                       # steps, and tokens a second of model.generate
    python -m benchmarks.bench_decode_models --cases llama_b16

bfloat16, mode="reduce-overhead" (CUDA graphs), unmodified transformers models with random weights. `step_ms` is the time of one step among
many that are enqueued one after another, the host's part included where it is the slower one; the sides take turns. Of `generate` it is a
token's share of a call's time, prefill included. `error` is the largest difference of the logits from those of the uncompiled model,
relative to the largest. `inductor` is Inductor with SDPA, `inductor_flex` with transformers' FlexAttention.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

from benchmarks import harness
from benchmarks.harness import PATTERNS, Bench, Row

COLUMNS = ("case", "family", "batch", "length", "filled", "what", "side", "step_ms", "tokens_per_s", "error", "failure")
SIDES: dict[str, dict[str, Any]] = {
    "attn_compiler": {"backend": "attn_compiler"},
    "inductor": {},
    "inductor_flex": {},
}
_STEPS, _ROUNDS = 20, 5
_PIECE = 512


@dataclass(frozen=True, kw_only=True)
class Case:
    """filled: lengths of the cache that steps are measured at. generated: new tokens of a `generate` call instead of steps. config: sizes
    that differ from the others'."""

    name: str
    family: str
    batch: int
    length: int = 4096
    filled: tuple[int, ...] = (2048, 4000, 64)
    sides: tuple[str, ...] = ("attn_compiler", "inductor")
    generated: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> dict[str, str]:
        return {"case": self.name, "family": self.family, "batch": str(self.batch), "length": str(self.length)}


#: DeepSeek V3.2's attention, whose queries have 2048 keys each, with few layers and without experts
_CHOOSING: dict[str, Any] = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 128)
_CHOOSING |= {"hidden_size": 7168, "intermediate_size": 4096, "num_hidden_layers": 2, "max_position_embeddings": 65536}
_CHOOSING |= {"layer_types": ["indexed_attention"] * 2, "mlp_layer_types": ["dense"] * 2, "index_topk": 2048}
CASES = (
    Case(name="llama_b16", family="Llama", batch=16, sides=("attn_compiler", "inductor", "inductor_flex")),
    Case(name="llama_b1", family="Llama", batch=1),
    Case(name="qwen3_b16", family="Qwen3", batch=16),
    Case(name="qwen3_b1", family="Qwen3", batch=1),
    Case(name="deepseek_v32_b1", family="DeepseekV32", batch=1, length=16384, filled=(8192, 16000), config=_CHOOSING),
    Case(name="llama_generate_b16", family="Llama", batch=16, length=2048 + 256, filled=(2048,), generated=256),
)
_CONFIG = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "max_position_embeddings": 8192}
_CONFIG |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}


def build(case: Case, side: str, device: str, weights: dict[str, torch.Tensor] | None = None, **config: Any) -> Any:
    """The case's model for a side, with those weights if they are given. config: other sizes than the benchmark's."""
    import transformers

    implementation = "flex_attention" if side == "inductor_flex" else "sdpa"
    sizes = {**_CONFIG, **({"head_dim": 128} if case.family == "Qwen3" else {}), **case.config, **config}
    made = getattr(transformers, f"{case.family}Config")(attn_implementation=implementation, **sizes)
    with torch.device(device):
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, f"{case.family}ForCausalLM")(made)
    if weights is not None:
        model.load_state_dict(weights, assign=True)
    return model.to(torch.bfloat16 if device != "cpu" else torch.float32).eval()


class Stepper:
    """A model, compiled, and a cache of its own that is filled up to any length."""

    def __init__(self, case: Case, model: Any, compiled: Callable[..., Any], device: str) -> None:
        import transformers

        self.token = torch.full((case.batch, 1), 7, device=device)
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=case.length)
        self._model, self._compiled = model, compiled
        generator = torch.Generator(device=device).manual_seed(1)
        ids = torch.randint(3, 1000, (case.batch, max(case.filled)), device=device, generator=generator)
        with torch.no_grad():
            for start in range(0, ids.shape[1], _PIECE):
                self._call(model, ids[:, start : start + _PIECE])

    def fill(self, length: int) -> None:
        """What lies beyond is not there any more: the layers count on from here."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(length)

    @torch.no_grad()
    def step(self) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return self._call(self._compiled, self.token)

    @torch.no_grad()
    def eager_step(self) -> torch.Tensor:
        return self._call(self._model, self.token)

    def _call(self, run: Callable[..., Any], ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = run(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        return logits


def stepper(case: Case, side: str, weights: dict[str, torch.Tensor] | None, device: str, **config: Any) -> Stepper:
    """Compiled when it is given."""
    model = build(case, side, device, weights, **config)
    settings: dict[str, Any] = {"mode": "reduce-overhead"} if device != "cpu" else {}
    found = Stepper(case, model, torch.compile(model, **SIDES[side], **settings), device)
    for _ in range(4):
        found.fill(case.filled[0])
        found.step()
    return found


def error(made: Stepper, filled: int) -> float:
    made.fill(filled)
    right = made.eager_step().float()
    made.fill(filled)
    return float((made.step().float() - right).abs().max() / right.abs().max())


def milliseconds(made: dict[str, Stepper], filled: int) -> dict[str, float]:
    """Of one step, for each side, median over rounds."""
    found: dict[str, list[float]] = {side: [] for side in made}
    for _ in range(_ROUNDS):
        for side, own in made.items():
            own.fill(filled)
            own.step()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(_STEPS):
                own.step()
            end.record()
            end.synchronize()
            found[side].append(begin.elapsed_time(end) / _STEPS)
    return {side: statistics.median(times) for side, times in found.items()}


def measure(case: Case, given: Namespace) -> Iterator[Row]:
    """The rows of a case."""
    for row in (_steps if case.generated is None else _generated)(case, given):
        yield {**case.names, **row}


def _compiled(case: Case, what: str, make: Callable[[str], Any], made: dict[str, Any]) -> Iterator[Row]:
    """Fill in what is made for each side; give rows of those that fail."""
    for side in case.sides:
        try:
            made[side] = make(side)
        except Exception as failure:  # noqa: BLE001 (the reason is the row)
            yield {"what": what, "side": side, "failure": harness.failure(failure)}


def _steps(case: Case, given: Namespace) -> Iterator[Row]:
    made: dict[str, Stepper] = {}
    weights = build(case, "inductor", given.device).state_dict()
    yield from _compiled(case, "step", lambda side: stepper(case, side, weights, given.device), made)
    errors = {side: error(own, case.filled[0]) for side, own in made.items()}
    for filled in case.filled:
        for side, ms in milliseconds(made, filled).items():
            times = {"step_ms": f"{ms:.3f}", "tokens_per_s": f"{case.batch / ms * 1e3:.0f}"}
            yield {"filled": str(filled), "what": "step", "side": side, **times, "error": f"{errors[side]:.2g}"}


def generate(model: Any, ids: torch.Tensor, tokens: int, side: str, bar: Progress) -> tuple[float, torch.Tensor]:
    """Seconds of a greedy call with a static cache, whose decoding steps transformers compiles, and all tokens."""
    import transformers

    task = bar.add_task(side, total=tokens)

    def advance(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        bar.advance(task)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    settings = {"mode": "reduce-overhead", "fullgraph": False, "dynamic": None}
    config = transformers.CompileConfig(**{"backend": "inductor", **SIDES[side], **settings})
    torch.cuda.synchronize()
    start = time.perf_counter()
    found: torch.Tensor = model.generate(
        ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, cache_implementation="static",
        compile_config=config, pad_token_id=0, stopping_criteria=transformers.StoppingCriteriaList([advance]),
    )  # fmt: skip
    torch.cuda.synchronize()
    return time.perf_counter() - start, found


def _generated(case: Case, given: Namespace) -> Iterator[Row]:
    """A first call compiles; the second is timed. Each side has a model of its own, since transformers keeps what it compiled there."""
    device, filled, tokens = given.device, case.filled[0], case.generated or 0
    generator = torch.Generator(device=device).manual_seed(1)
    ids = torch.randint(3, 1000, (case.batch, filled), device=device, generator=generator)
    weights = build(case, "inductor", device).state_dict()
    models: dict[str, Any] = {}
    with Progress(console=Console(stderr=True)) as bar:

        def make(side: str) -> Any:
            model = build(case, side, device, weights)
            generate(model, ids, tokens, side, bar)
            return model

        yield from _compiled(case, "generate", make, models)
        for side, model in models.items():
            seconds, _ = generate(model, ids, tokens, side, bar)
            times = {"step_ms": f"{seconds / tokens * 1e3:.3f}", "tokens_per_s": f"{case.batch * tokens / seconds:.0f}"}
            yield {"filled": str(filled), "what": "generate", "side": side, **times}


BENCH = Bench(
    doc=__doc__, results="decode_models_h200.csv", columns=COLUMNS, measure=measure, sides=SIDES, devices=("cuda",),
    cases=lambda given: harness.picked(CASES, given.cases), options=(PATTERNS,),
    short=("case", "what", "filled", "side", "step_ms", "tokens_per_s", "error", "failure"),
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
