"""Padded batches with `options={"unpad": True}`, beside Inductor and beside our backend without the option, in one process.

    python -m benchmarks.bench_unpad --budget 150          # on a GPU: inference of four models and training of two, three fills
    python -m benchmarks.bench_unpad --dry-run             # tiny models on a CPU, to see that it runs

Each case is compiled once a side, and all its fills run on that code. A case starts while there is time for it (`--budget`); its timing
takes what remains, shared by the cases that follow. Rows are written as they come, to benchmarks/results/unpad_gpu.csv.
`error`: the largest difference from eager on real tokens (in training of the loss), over eager's largest number. `launched_ms`: how long
the host is busy in one call, with nothing queued before. `padded_calls`: those of the last calls that ran padded.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn

from benchmarks import harness

RESULTS = Path(__file__).parent / "results"
FILLS = (0.5, 0.76, 1.0)
SIDES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "inductor": ("inductor", {}),
    "padded": ("attn_compiler", {}),
    "unpad": ("attn_compiler", {"unpad": True}),
}
COLUMNS = (
    *("case", "training", "dtype", "inputs", "fill", "mode", "rounds"),
    *(f"{side}_p50_ms" for side in SIDES),
    *(
        "over_inductor",
        "over_padded",
        "inductor_launched_ms",
        "unpad_launched_ms",
        "padded_calls",
        "error",
        "kept",
        "compile_s",
        "failure",
    ),
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


def loss_of(model: nn.Module) -> Callable[..., torch.Tensor]:
    """The model's loss, and nothing else that a graph would have to give back."""

    def loss(**batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(**batch).loss
        return found

    return loss


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


def measure(
    case: Case, device: str, *, dry: bool, mode: str, sides: Sequence[str], seconds: Callable[[], float]
) -> Iterator[dict[str, str]]:
    """A row for each fill. sides: of SIDES, with "inductor" and "unpad". seconds: for timing a row, asked when it starts."""
    import attn_compiler

    torch._dynamo.reset()
    attn_compiler.reset()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = build(case, dry=dry).to(device, dtype)
    compiled = {}
    for side in sides:
        backend, given = SIDES[side]
        recorded = RECORDED if mode == "reduce-overhead" else {}
        function = loss_of(model) if case.loss_alone else model
        compiled[side] = torch.compile(function, dynamic=False, backend=backend, options={**given, **recorded})
    for fill in FILLS:
        start = time.perf_counter()
        own = batch_of((3, 24) if dry else case.shape, fill, labels=case.training)
        batch = {name: x.to(device) for name, x in own.items()}
        steps = {side: step_of(model, one, batch, training=case.training) for side, one in compiled.items()}
        expected = step_of(model, model, batch, training=case.training)()
        error = apart(steps["unpad"](), expected, batch["attention_mask"])
        for step in steps.values():
            for _ in range(_WARM_CALLS):
                step()
        compile_s = time.perf_counter() - start
        times = harness.interleave(
            steps, device, seconds=seconds(), min_rounds=1 if dry else 5, max_rounds=1 if dry else 100
        )
        yield {
            "case": case.name,
            "training": "yes" if case.training else "no",
            "dtype": str(dtype).removeprefix("torch."),
            "inputs": " x ".join(map(str, own["attention_mask"].shape)),
            "fill": f"{float(own['attention_mask'].float().mean()):.3f}",
            "mode": mode,
            "rounds": str(len(times["unpad"])),
            **{f"{side}_p50_ms": f"{statistics.median(of):.4g}" for side, of in times.items()},
            **{
                f"over_{side}": f"{harness.ratio(times[side], times['unpad']):.3f}" for side in sides if side != "unpad"
            },
            **{f"{side}_launched_ms": f"{launched(steps[side], device):.3f}" for side in ("inductor", "unpad")},
            "error": f"{error:.2e}",
            "compile_s": f"{compile_s:.1f}",
            **_found(),
        }


def _found() -> dict[str, str]:
    """What the last graph says that padding was to be taken out of."""
    import attn_compiler

    said = next((report.unpad for report in reversed(attn_compiler.reports()) if report.unpad is not None), None)
    last = [] if said is None else said.last
    kept = "nothing was compiled" if said is None else said.kept or ""
    return {"kept": str(kept), "padded_calls": str(sum(bool(step.failed) for step in last))}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny models on a CPU, one round")
    parser.add_argument("--cases", nargs="+", help="names of cases, or parts of them; all if none is given")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds of the whole run (default %(default)s)")
    parser.add_argument("--sides", nargs="+", choices=tuple(SIDES), default=tuple(SIDES))
    parser.add_argument("--mode", choices=("default", "reduce-overhead"), default="default")
    harness.add_output(parser, RESULTS / "unpad_gpu.csv")
    options = parser.parse_args()
    sides = ("inductor", "unpad", *(side for side in options.sides if side == "padded"))
    end = time.monotonic() + options.budget
    device = "cpu" if options.dry_run else "cuda"
    file, where = harness.opened(options, COLUMNS, device)
    wanted = [c for c in CASES if not options.cases or any(part.lower() in c.name.lower() for part in options.cases)]
    for i, case in enumerate(wanted):
        if time.monotonic() > end:
            print(f"no time for {', '.join(left.name for left in wanted[i:])}", flush=True)
            break
        rows = (len(wanted) - i) * len(FILLS)
        seconds = functools.partial(lambda rows: min(3.0, max(0.3, (end - time.monotonic()) / rows / 3)), rows)
        try:
            for row in measure(case, device, dry=options.dry_run, mode=options.mode, sides=sides, seconds=seconds):
                file.add({**row, **where})
                print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        except Exception as error:  # noqa: BLE001 (one case that fails must not cost the others)
            failed = {"case": case.name, "training": "yes" if case.training else "no", "mode": options.mode}
            file.add({**failed, "failure": " ".join(f"{type(error).__name__}: {error}".split())[:400], **where})
            print(f"{case.name} failed: {error}", flush=True)


if __name__ == "__main__":
    main()
