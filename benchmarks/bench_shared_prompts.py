"""Prompts that rows share, with `options={"share_prefix": True}`: beside Inductor and beside our backend without it, in one process.

    python -m benchmarks.bench_shared_prompts --budget-seconds 170                  # on a GPU: 8 layers, bfloat16
    python -m benchmarks.bench_shared_prompts --device cpu                          # one thread: 4 small layers, float32
    python -m benchmarks.bench_shared_prompts --layers 4 --sides inductor --cases 'Llama*'    # compiles in half the time

A call gives the log-probabilities of the answers' tokens; a step is that with a backward. Each case is compiled once a side, and batches of
fewer and more different prompts run on that code, the last of which share nothing. `error`, `gradient_error`: how far a side is from eager
(the norm of the difference over eager's). A row fails where sharing is more than twice as far as Inductor. `kept_mib`: what a forward keeps
for its backward. `peak_mib`: the most that a call allocates, on a GPU. `first_s`: the first call, which compiles
with what Inductor's caches hold. Times on a CPU are of the process alone.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor

import attn_compiler
from benchmarks import compare, harness
from benchmarks.harness import Bench, Row, arg

SIDES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "inductor": ("inductor", {}),
    "unpad": ("attn_compiler", {"unpad": True}),
    "shared": ("attn_compiler", {"share_prefix": True}),
}
_OF_A_SIDE = ("p50_ms", "kept_mib", "peak_mib", "first_s", "error", "gradient_error")
COLUMNS = (
    *("model", "batch", "pass", "layers", "dtype", "prompts", "tokens", "computed", "rounds", "over_inductor", "over_unpad"),
    *(f"{side}_{name}" for name in _OF_A_SIDE for side in SIDES), "failure",
)  # fmt: skip
#: (batch, rows, tokens of a prompt, of an answer, numbers of different prompts)
_BATCHES = (
    ("8 x (1024 + 256)", 8, 1024, 256, (1, 2, 8)),
    ("16 x (512 + 512)", 16, 512, 512, (1, 4, 16)),
    ("DPO 2 x (1024 + 512 + 512)", 4, 1024, 512, (2, 4)),
)
_ON_CPU = (("8 x (384 + 128)", 8, 384, 128, (1, 2, 8)), ("DPO 2 x (384 + 128 + 128)", 4, 384, 128, (2, 4)))
_TINY = (("4 x (32 + 8)", 4, 32, 8, (1, 4)),)
#: of a model: width, that of its MLP, heads, words
_SIZES, _SMALL, _TINIEST = (2048, 5632, 16, 32000), (256, 768, 4, 1000), (32, 48, 2, 60)
_WARM_CALLS = 6  # On a GPU those that are asked tell of the next ones.

#: (ids, mask) -> log-probabilities (rows, answer)
Function = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """So many rows of a prompt and an answer. prompts: numbers of different prompts among them."""

    model: str
    batch: str
    rows: int
    prompt: int
    answer: int
    prompts: tuple[int, ...]
    training: bool

    @property
    def names(self) -> dict[str, str]:
        return {"model": self.model, "batch": self.batch, "pass": "step" if self.training else "forward"}

    def ids(self, prompts: int, words: int) -> Tensor:
        """int64 (rows, prompt + answer), with so many different prompts. No row is another one."""
        shape, generator = (self.rows, self.prompt + self.answer), torch.Generator().manual_seed(1)
        ids = torch.randint(5, words, shape, generator=generator)
        ids[:, : self.prompt] = ids[torch.arange(self.rows) % prompts, : self.prompt]
        return ids


def cases(given: Namespace) -> list[Case]:
    batches = _TINY if given.dry_run else _ON_CPU if given.device == "cpu" else _BATCHES
    found = [
        Case(model=model, training=training, batch=name, rows=rows, prompt=prompt, answer=answer, prompts=prompts)
        for name, rows, prompt, answer, prompts in batches
        for model in ("Llama", "Qwen3")
        for training in (True, False)
    ]
    return harness.picked(found, given.cases, lambda case: "/".join(case.names.values()))


def build(case: Case, given: Namespace, layers: int) -> Any:
    """With random weights."""
    import transformers

    width, wide, heads, words = _TINIEST if given.dry_run else _SMALL if given.device == "cpu" else _SIZES
    sizes = {"hidden_size": width, "intermediate_size": wide, "vocab_size": words, "num_hidden_layers": layers}
    of_heads = {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "head_dim": width // heads}
    config = getattr(transformers, f"{case.model}Config")(**sizes, **of_heads, attn_implementation="sdpa")
    torch.manual_seed(0)
    return getattr(transformers, f"{case.model}ForCausalLM")(config).train(case.training)


def call_of(model: Any, answer: int) -> Function:
    def log_probabilities(ids: Tensor, mask: Tensor) -> Tensor:
        logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=answer + 1, use_cache=False).logits[:, :-1]
        return torch.log_softmax(logits.float(), -1).gather(-1, ids[:, -answer:, None])[..., 0]

    return log_probabilities


def kept_mib(forward: Callable[[], Tensor], parameters: list[Tensor]) -> float:
    """What a forward keeps for its backward, beside parameters."""
    known, found = {x.untyped_storage().data_ptr() for x in parameters}, dict[int, int]()

    def see(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(see, lambda x: x):
        output = forward()
    del output
    return sum(size for at, size in found.items() if at not in known) / 2**20


def peak_mib(step: Callable[[], Tensor], parameters: list[Tensor]) -> float:
    for x in parameters:
        x.grad = None
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 2**20


def measure(case: Case, given: Namespace) -> Iterator[Row]:
    """A row for each number of prompts, while there is time."""
    attn_compiler.reset()
    if given.device == "cpu":
        torch.set_num_threads(1)
    layers = given.layers or (4 if given.device == "cpu" else 8)
    model = build(case, given, layers).to(given.device, torch.float32 if given.device == "cpu" else torch.bfloat16)
    parameters = list(model.parameters())
    mask = torch.ones(case.rows, case.prompt + case.answer, dtype=torch.long, device=given.device)
    call, first_s = call_of(model, case.answer), {}
    sides = {side: torch.compile(call, dynamic=False, backend=backend, options={**options})
             for side, (backend, options) in SIDES.items() if side in ("shared", *given.sides)}  # fmt: skip

    def step(function: Function, ids: Tensor) -> Tensor:
        if not case.training:
            with torch.no_grad():
                return function(ids, mask)
        for x in parameters:
            x.grad = None
        found = function(ids, mask)
        (found * torch.linspace(-1, 1, len(found), device=found.device)[:, None]).mean().backward()
        return found.detach()

    def numbers(function: Function, ids: Tensor) -> list[list[Tensor]]:
        return [[step(function, ids)], [x.grad.clone() for x in parameters if x.grad is not None]]

    for prompts in case.prompts:
        if time.monotonic() > given.until:
            return
        ids = case.ids(prompts, model.config.vocab_size).to(given.device)
        expected, row = numbers(call, ids), {}
        for side, function in sides.items():
            start = time.perf_counter()
            found = numbers(function, ids)
            first_s.setdefault(side, f"{time.perf_counter() - start:.1f}")
            for name, mine, theirs in zip(("error", "gradient_error"), found, expected, strict=True):
                if mine:
                    row[f"{side}_{name}"] = f"{compare.relative_error(mine, theirs):.2e}"
            del found
        del expected
        steps = {side: functools.partial(step, function, ids) for side, function in sides.items()}
        for side, one in steps.items():
            for _ in range(1 if given.device == "cpu" else _WARM_CALLS):
                one()
            if case.training:
                row[f"{side}_kept_mib"] = f"{kept_mib(lambda: sides[side](ids, mask), parameters):.1f}"  # noqa: B023
            if given.device != "cpu":
                row[f"{side}_peak_mib"] = f"{peak_mib(one, parameters):.0f}"
        seconds = min(given.seconds, max(0.5, (given.until - time.monotonic()) / 20))
        times = harness.interleave(steps, given.device, seconds=seconds, min_rounds=3, warmup=1, clock="process")
        last = [r.unpad.last[-1] for r in attn_compiler.reports() if r.unpad and r.unpad.shares and r.unpad.last]
        yield {
            **case.names, **row, "layers": str(layers), "dtype": str(model.dtype).removeprefix("torch."),
            "prompts": str(prompts), "tokens": str(ids.numel()), "rounds": str(len(times["shared"])),
            "computed": str(last[0].number if last and not last[0].failed else ids.numel()), "failure": wrong(row, model.dtype),
            **{f"{side}_p50_ms": f"{statistics.median(of):.4g}" for side, of in times.items()},
            **{f"{side}_first_s": of for side, of in first_s.items()},
            **{f"over_{side}": f"{harness.ratio(of, times['shared']):.3f}" for side, of in times.items() if side != "shared"},
        }  # fmt: skip


def wrong(row: Row, dtype: torch.dtype) -> str:
    """The words of a row whose numbers are further from eager's than twice Inductor's, and than rounding takes them."""
    names = [name for name in ("error", "gradient_error") if f"shared_{name}" in row]
    least = 4 * torch.finfo(dtype).eps
    far = [n for n in names if not float(row[f"shared_{n}"]) <= max(least, 2 * float(row.get(f"inductor_{n}", 0)))]
    return f"WRONG: {', '.join(far)}" if far else ""


BENCH = Bench(
    doc=__doc__, columns=COLUMNS, cases=cases, measure=measure, sides=SIDES,
    results=lambda given: f"shared_prompts_{'cpu' if given.device == 'cpu' else 'gpu'}.csv",
    options=(
        arg("--cases", nargs="+", default=["*"], metavar="PATTERN", help="'Llama*step', '*/8 x*/forward'"),
        arg("--sides", nargs="+", choices=tuple(SIDES), default=tuple(SIDES), help="beside shared"),
        arg("--layers", type=int, default=None, help="8 on a GPU, 4 on a CPU"),
    ),
    devices=("cuda", "cpu"), seconds=3.0, budget=600.0, dry=True,
    short=("model", "batch", "pass", "prompts", "computed", "over_inductor", "over_unpad", "failure"),
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
