"""Padded batches with `options={"unpad": True}`, beside Inductor and beside our backend without the option, in one process.

    python -m benchmarks.bench_unpad --budget 150          # on a GPU: inference of four models and training of two, three fills
    python -m benchmarks.bench_unpad --dry-run             # tiny models on a CPU, to see that it runs

Each case is compiled once a side, and all its fills run on that code. A case starts while there is time for it (`--budget`); its timing
takes what remains, shared by the cases that follow. Rows are written as they come, to benchmarks/results/unpad_gpu.csv. `error`: the
largest difference from eager on real tokens (in training of the loss), over eager's largest number. `launched_ms`: how long the host is
busy in one call, with nothing queued before. `padded_calls`: those of the last calls that ran padded.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn

from benchmarks import harness
from benchmarks.harness import Bench, Row, arg

FILLS = (0.5, 0.76, 1.0)
SIDES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "inductor": ("inductor", {}),
    "padded": ("attn_compiler", {}),
    "unpad": ("attn_compiler", {"unpad": True}),
}
COLUMNS = (
    *("case", "training", "dtype", "inputs", "fill", "mode", "rounds"),
    *(f"{side}_p50_ms" for side in SIDES),
    *("over_inductor", "over_padded", "inductor_launched_ms", "unpad_launched_ms"),
    *("padded_calls", "error", "kept", "compile_s", "failure"),
)
#: CUDA graphs, also of packed graphs
RECORDED = {"triton.cudagraphs": True, "triton.cudagraph_skip_dynamic_graphs": False}
_WARM_CALLS = 6  # Those that are asked tell of the next ones, and CUDA graphs are recorded.

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model of Hugging Face. config: its fields. shape: rows and positions of its batches. loss_alone: no logits are given back."""

    name: str
    model: str
    config: str
    shape: tuple[int, int]
    sizes: Mapping[str, Any]
    training: bool = False
    loss_alone: bool = False

    @property
    def names(self) -> dict[str, str]:
        return {"case": self.name, "training": "yes" if self.training else "no"}


def padding(batch: int, length: int, fill: float) -> torch.Tensor:
    """int64 (batch, length), padded on the right: lengths spread evenly, and up to rounding that share of tokens is real."""
    shortest = max(1.0, length * (2 * fill - 1)) if fill > 0.5 else 1.0
    spread = torch.linspace(shortest, length if fill > 0.5 else 2 * fill * length, batch).round().long()
    return (torch.arange(length) < spread[:, None]).long()


def batch_of(shape: tuple[int, int], fill: float, *, labels: bool) -> Batch:
    mask = padding(*shape, fill)
    ids = torch.randint(5, 1000, shape, generator=torch.Generator().manual_seed(0))
    made = {"input_ids": ids * mask, "attention_mask": mask}
    return made | ({"labels": ids.masked_fill(mask == 0, -100)} if labels else {})


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WIDE = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16}
LLAMA = {**WIDE, "num_hidden_layers": 8, "num_key_value_heads": 4, "use_cache": False}
T5 = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
XLM_R = {"max_position_embeddings": 514, "pad_token_id": 1, "vocab_size": 250002}
CASES: tuple[Case, ...] = (
    Case("BERT", "BertModel", "BertConfig", (32, 512), {}),
    Case(name="BERT", model="BertForMaskedLM", config="BertConfig", shape=(32, 512), sizes=NO_DROPOUT, training=True),
    Case("BERT's loss", "BertForMaskedLM", "BertConfig", (32, 512), NO_DROPOUT, training=True, loss_alone=True),
    Case("Llama", "LlamaForCausalLM", "LlamaConfig", (8, 2048), LLAMA, training=True),
    Case("ModernBERT", "ModernBertModel", "ModernBertConfig", (16, 2048), {}),
    Case("T5 encoder", "T5EncoderModel", "T5Config", (32, 512), T5),
    Case("XLM-R", "XLMRobertaModel", "XLMRobertaConfig", (32, 512), XLM_R),
)
_TINY = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 96}
_TINY_T5 = {"d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 2, "num_heads": 2}


def build(case: Case, *, dry: bool) -> nn.Module:
    """With random weights."""
    import transformers

    tiny = _TINY_T5 if case.name.startswith("T5") else _TINY
    fewer = {"num_key_value_heads": 1} if "num_key_value_heads" in case.sizes else {}
    sizes = {**case.sizes, **({**tiny, **fewer} if dry else {})}
    config = getattr(transformers, case.config)(**sizes, attn_implementation="sdpa")
    torch.manual_seed(0)
    return getattr(transformers, case.model)(config).train(case.training)


def step_of(model: nn.Module, function: Any, batch: Batch, *, training: bool) -> harness.Step:
    """A forward, or a forward of the loss with the backward."""
    if not training:

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return harness.main_output(function(**batch))

        return forward

    parameters = list(model.parameters())

    def forward_backward() -> torch.Tensor:
        # `zero_grad` looks for parameters for milliseconds, in which the device has nothing to do.
        for parameter in parameters:
            parameter.grad = None
        output = function(**batch)
        loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        return loss.detach()

    return forward_backward


def apart(found: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor) -> float:
    """The largest difference on real tokens, over the largest number."""
    if expected.dim() == 3:
        found, expected = found[mask.bool()], expected[mask.bool()]
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1e-12))


def launched(step: harness.Step, device: str) -> float:
    """Milliseconds until a call comes back, with nothing queued before: the median of seven."""
    times = []
    for _ in range(7):
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def measure(case: Case, given: Namespace) -> Iterator[Row]:
    """A row for each fill, with a share of the time that is left."""
    import attn_compiler

    torch._dynamo.reset()
    attn_compiler.reset()
    device, dry, training = given.device, given.dry_run, case.training
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model: Any = build(case, dry=dry).to(device, dtype)

    def loss(**batch: torch.Tensor) -> torch.Tensor:
        """Nothing else that a graph would have to give back."""
        found: torch.Tensor = model(**batch).loss
        return found

    recorded = RECORDED if given.mode == "reduce-overhead" else {}
    compiled = {}
    for side in ("inductor", "unpad", *(side for side in given.sides if side == "padded")):
        backend, options = SIDES[side]
        function = loss if case.loss_alone else model
        compiled[side] = torch.compile(function, dynamic=False, backend=backend, options={**options, **recorded})
    for fill in FILLS:
        start = time.perf_counter()
        own = batch_of((3, 24) if dry else case.shape, fill, labels=training)
        batch = {name: x.to(device) for name, x in own.items()}
        steps = {side: step_of(model, one, batch, training=training) for side, one in compiled.items()}
        expected = step_of(model, model, batch, training=training)()
        error = apart(steps["unpad"](), expected, batch["attention_mask"])
        for step in steps.values():
            for _ in range(_WARM_CALLS):
                step()
        compile_s = time.perf_counter() - start
        seconds = min(3.0, max(0.3, (given.until - time.monotonic()) / given.rows / 3))
        least, most = (1, 1) if dry else (5, 100)
        times = harness.interleave(steps, device, seconds=seconds, min_rounds=least, max_rounds=most)
        over = {side: harness.ratio(times[side], times["unpad"]) for side in times if side != "unpad"}
        yield {
            **case.names, "dtype": str(dtype).removeprefix("torch."),
            "inputs": " x ".join(map(str, own["attention_mask"].shape)),
            "fill": f"{float(own['attention_mask'].float().mean()):.3f}", "mode": given.mode,
            "rounds": str(len(times["unpad"])),
            **{f"{side}_p50_ms": f"{statistics.median(of):.4g}" for side, of in times.items()},
            **{f"over_{side}": f"{ratio:.3f}" for side, ratio in over.items()},
            **{f"{side}_launched_ms": f"{launched(steps[side], device):.3f}" for side in ("inductor", "unpad")},
            "error": f"{error:.2e}", "compile_s": f"{compile_s:.1f}", **_found(),
        }  # fmt: skip
    given.rows -= len(FILLS)


def _found() -> dict[str, str]:
    """What the last graph says that padding was to be taken out of."""
    import attn_compiler

    said = next((report.unpad for report in reversed(attn_compiler.reports()) if report.unpad is not None), None)
    last = [] if said is None else said.last
    kept = "nothing was compiled" if said is None else said.kept or ""
    return {"kept": str(kept), "padded_calls": str(sum(bool(step.failed) for step in last))}


def cases(given: Namespace) -> list[Case]:
    """Those whose names hold one of the words."""
    found = [c for c in CASES if not given.cases or any(part.lower() in c.name.lower() for part in given.cases)]
    given.rows = len(found) * len(FILLS)
    return found


BENCH = Bench(
    doc=__doc__, results="unpad_gpu.csv", columns=COLUMNS, cases=cases, measure=measure, again=True, sides=SIDES,
    options=(
        arg("--cases", nargs="+", help="names of cases, or parts of them; all if none is given"),
        arg("--sides", nargs="+", choices=tuple(SIDES), default=tuple(SIDES)),
        arg("--mode", choices=("default", "reduce-overhead"), default="default"),
    ),
    devices=("cuda",), budget=600.0, dry=True, failed=lambda rows: False,
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
