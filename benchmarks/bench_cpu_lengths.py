"""Tiny models and attention alone on a CPU, at each length, beside Inductor: with AVX-512 and with AVX2, and with one and two threads.

    python -m benchmarks.bench_cpu_lengths --jobs 7        # a pair of cores for each of seven processes; Linux
    python -m benchmarks.bench_cpu_lengths --append --cases 'avx512 bert *'

A name is "isa model mask dtype training threads length". A process measures the lengths of one model, tied to cores of its own. Its
instructions are those of ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA, which Inductor reads, too. A call has some 512 tokens. Of attention
alone (8 heads of 64), each lowering is timed in turns with what is chosen: `math_ms`, `sdpa_cpu_flash_ms`, `rows_ms`; none where it does
not serve. Nothing begins after `--budget-seconds`; `--append` measures what has no row yet.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import compare, cores, harness, models
from benchmarks.compare import Case
from benchmarks.harness import BACKEND, BASELINE, Bench, Row

LENGTHS = (128, 512, 16, 1024, 64, 256)
#: what PyTorch and oneDNN are told
ISAS: Mapping[str, Mapping[str, str]] = {
    "own": {},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}
LOWERINGS = ("math", "sdpa_cpu_flash", "rows")
ATTENTION = "attention"
_TOKENS, _HEADS, _HEAD_DIM = 512, 8, 64
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENCODER = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 12}
_VIT = {
    "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 3, "patch_size": 8, **_NO_DROPOUT,
}  # fmt: skip
_LLAMA = {**_ENCODER, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 1024, "use_cache": False}
_WHISPER = {
    **models.whisper(384, 1536, 2, 6, frames=2048, text=1024),
    "dropout": 0.0, "use_cache": False,
}  # fmt: skip
_T5 = {
    "d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 2, "num_heads": 4, "vocab_size": 1024,
    "dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False,
}  # fmt: skip
#: configuration, model, and the configuration's arguments
MODELS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "bert": ("BertConfig", "BertModel", {**_ENCODER, **_NO_DROPOUT, "max_position_embeddings": 1024}),
    "vit": ("ViTConfig", "ViTModel", _VIT),
    "llama": ("LlamaConfig", "LlamaModel", _LLAMA),
    "whisper": ("WhisperConfig", "WhisperModel", _WHISPER),
    "t5": ("T5Config", "T5Model", _T5),
}
MASKS: Mapping[str, tuple[str, ...]] = {"bert": ("padding",), ATTENTION: ("no", "causal", "padding")}


@dataclass(frozen=True, kw_only=True)
class Cell(harness.Named):
    """isa: of ISAS. model: of MODELS, or attention alone. mask: of its tokens. training: yes or no."""

    isa: str
    model: str
    mask: str
    dtype: str
    training: str
    threads: int
    length: int

    @property
    def name(self) -> str:
        return " ".join(self.names.values())

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def rows(self) -> int:
        """Sequences of a call: of several, some are padded."""
        return max(2 if self.mask == "padding" else 1, _TOKENS // self.length)

    def is_real(self) -> torch.Tensor | None:
        """bool (rows, length): the tokens that count, from half of them on; None where all do."""
        if self.mask != "padding":
            return None
        lengths = torch.linspace(self.length, self.length // 2, self.rows + 1)[: self.rows].round()
        return torch.arange(self.length) < lengths[:, None]


CELLS = tuple(
    Cell(isa=isa, model=model, mask=mask, dtype=dtype, training=training, threads=threads, length=length)
    for threads, dtype, training, isa in itertools.product((1, 2), ("bfloat16", "float32"), ("yes", "no"), ISAS)
    # What a CPU has beyond AVX-512 is for half precision.
    if (isa, dtype) != ("own", "float32")
    for model in (ATTENTION, *MODELS)
    for mask in MASKS.get(model, ("no",))
    for length in LENGTHS
)


def case(cell: Cell) -> Case:
    """The model with random weights, and its inputs."""
    import transformers

    config, model_class, arguments = MODELS[cell.model]
    rows, length = cell.rows, cell.length
    image = (8 * 2 ** (length.bit_length() // 2), 8 * length // 2 ** (length.bit_length() // 2))
    further: dict[str, Any] = {"vit": {"image_size": image}, "whisper": {"max_source_positions": length}}.get(
        cell.model, {}
    )
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**arguments, **further}, attn_implementation="sdpa")
    model: nn.Module = getattr(transformers, model_class)(made).to(cell.torch_dtype).train(cell.training == "yes")
    tokens = torch.randint(3, 1000, (rows, length))
    few = torch.randint(3, 1000, (rows, max(8, length // 4)))
    valid = cell.is_real()
    inputs: dict[str, torch.Tensor] = {
        "vit": lambda: {"pixel_values": torch.randn(rows, 3, *image).to(cell.torch_dtype)},
        "whisper": lambda: {
            "input_features": torch.randn(rows, 80, 2 * length).to(cell.torch_dtype),
            "decoder_input_ids": few,
        },
        "t5": lambda: {"input_ids": tokens, "decoder_input_ids": few},
    }.get(cell.model, lambda: {"input_ids": tokens})()
    if valid is not None:
        inputs["attention_mask"] = valid.long()
    return Case(model=model, inputs=inputs, training=cell.training == "yes", valid=valid)


def of_attention(cell: Cell, seconds: float) -> Row:
    """Each lowering by itself, in turns with what is chosen and with Inductor; the error against float64."""
    import attn_compiler

    shape = (cell.rows, _HEADS, cell.length, _HEAD_DIM)
    training, real = cell.training == "yes", cell.is_real()
    operands = [torch.randn(shape).to(cell.torch_dtype).requires_grad_(training) for _ in range(3)]
    lengths = None if real is None else real.sum(1)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
        mask = None if lengths is None else (torch.arange(q.shape[2]) < lengths[:, None])[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=cell.mask == "causal")

    def results(function: Any, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.set_grad_enabled(training):
            out = function(*given, lengths)
        return [out.detach(), *(torch.autograd.grad(out, given, torch.ones_like(out)) if training else ())]

    steps, lowerings = {}, {}
    for side in (BASELINE, BACKEND, *LOWERINGS):
        attn_compiler.reset()
        options = {"lowering": side} if side in LOWERINGS else None
        compiled = torch.compile(
            attention, backend=BASELINE if side == BASELINE else BACKEND, options=options, dynamic=False
        )
        try:
            results(compiled, operands)
        except Exception as error:  # noqa: BLE001 (one that does not serve has no time)
            lowerings[side] = harness.failure(error)
            continue
        lowerings[side] = compare.chosen(attn_compiler.reports())["lowerings"].partition(" ")[0]
        if side in (BASELINE, BACKEND, lowerings[side]):
            steps[side] = lambda compiled=compiled: results(compiled, operands)
    exact = results(attention, [x.detach().double().requires_grad_(training) for x in operands])
    errors = {side: compare.relative_error(steps[side](), exact) for side in steps}
    times = harness.interleave(steps, "cpu", seconds=seconds)
    return {
        **harness.timing_columns({side: times[side] for side in (BASELINE, BACKEND)}), "lowerings": lowerings[BACKEND],
        **{f"{side}_ms": f"{statistics.median(times[side]):.4g}" for side in LOWERINGS if side in times},
        "error": f"{errors[BACKEND]:.3g}", "error_eager": f"{errors[BASELINE]:.3g}",
        "numerics": "ok" if errors[BACKEND] <= 2 * errors[BASELINE] + compare.ROUNDING_NOISE else "WRONG",
    }  # fmt: skip


def measured(cell: Cell, given: Namespace) -> list[Row]:
    """Its row, in a process that runs with its instructions."""
    torch.compiler.reset()
    torch.set_num_threads(cell.threads)
    torch.manual_seed(0)
    if cell.model == ATTENTION:
        row = of_attention(cell, given.seconds)
    else:
        made = case(cell)
        row = compare.compare(made, compare.compile_both(made), seconds=given.seconds)
    return [{**row, "capability": torch.backends.cpu.get_cpu_capability()}]


SIDE_BY_SIDE = cores.SideBySide(
    module="benchmarks.bench_cpu_lengths",
    group=lambda cell: tuple(cell.names.values())[:-1],
    environment=lambda cell, given: {
        "OMP_NUM_THREADS": str(cell.threads), "TORCHINDUCTOR_COMPILE_THREADS": "1", **ISAS[cell.isa],
    },
)  # fmt: skip
BENCH = Bench(
    doc=__doc__, results="cpu_lengths.csv",
    columns=(
        *(*Cell.__dataclass_fields__, *compare.COLUMNS),
        *(*(f"{name}_ms" for name in LOWERINGS), "capability", "took_s", "failure"),
    ),
    cases=lambda given: harness.picked(CELLS, given.cases), rows=SIDE_BY_SIDE.rows,
    instead=lambda given: cores.answer(given, Cell, measured),
    options=cores.OPTIONS,
    devices=("cpu",), seconds=1.5, budget=3600.0,
    where=lambda given: {
        name: value for name, value in harness.environment("cpu", given.commit).items() if name != "threads"
    },
    short=("isa", "model", "mask", "dtype", "training", "threads", "length", "lowerings", "ratio", "numerics", "failure"),
    failed=lambda rows: bool(harness.failures(rows)) or any(row.get("failure") for row in rows),
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
