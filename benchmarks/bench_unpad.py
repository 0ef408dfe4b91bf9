"""Padded batches with `options={"unpad": True}`, beside Inductor and beside our backend without the option, in one process.

    python -m benchmarks.bench_unpad                       # CPU: MiniLM on 32 sentences, as they are and without any padding;
                                                           # sentence-transformers' encode of 128, tokenizer and sorting included
    python -m benchmarks.bench_unpad --device cuda         # BERT, XLM-R, ModernBERT, a T5 encoder; training of BERT and Llama
    python -m benchmarks.bench_unpad --dry-run [--device cuda]   # the same with tiny models, to see that it runs

Each case is compiled once a side, and all its fills run on that code. Writes benchmarks/results/unpad_cpu.csv or unpad_h200.csv.
`error`: the largest difference from eager on real tokens (in training of the loss), over eager's largest number. `gradient_error`: the same
of the worst parameter, of those whose gradient is no mere rounding.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn

from benchmarks import harness

RESULTS = Path(__file__).parent / "results"
SIDES: Mapping[str, Mapping[str, Any]] = {
    "inductor": {"backend": "inductor"},
    "padded": {"backend": "attn_compiler"},
    "unpad": {"backend": "attn_compiler", "options": {"unpad": True}},
}
ENCODE = "MiniLM-L6-v2, sentence-transformers' encode"
KEYS = ("case", "training", "dtype", "inputs", "fill")
COLUMNS = (
    *(*KEYS, "rounds"),
    *(f"{side}_p50_ms" for side in SIDES),
    *("over_inductor", "over_padded", "error", "gradient_error", "compilations", "kept", "lowerings", "failure"),
)
#: parameters whose gradient is smaller than this share of the largest have rounding for a gradient (keys' biases)
_NOTHING = 1e-3

Batch = dict[str, torch.Tensor]
Step = Callable[[], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """build: makes the model and the batch for each fill. training: forward and backward of the model's loss."""

    name: str
    build: Callable[[bool], tuple[nn.Module, Mapping[str, Batch]]]
    training: bool = False


# ---- batches -------------------------------------------------------------------------------------------------------------


def padding(batch: int, length: int, fill: float) -> torch.Tensor:
    """int64 (batch, length), padded on the right: lengths spread evenly, the longest row full, up to rounding that share of tokens."""
    shortest = max(1.0, length * (2 * fill - 1)) if fill > 0.5 else 1.0
    spread = torch.linspace(shortest, length if fill > 0.5 else 2 * fill * length, batch).round().long()
    return (torch.arange(length) < spread[:, None]).long()


def batches(batch: int, length: int, vocabulary: int, *, labels: bool) -> Mapping[str, Batch]:
    """Half full and full."""
    made = {}
    for fill in (0.5, 1.0):
        mask = padding(batch, length, fill)
        ids = torch.randint(5, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
        made[f"{fill:g}"] = {"input_ids": ids * mask, "attention_mask": mask}
        if labels:
            made[f"{fill:g}"]["labels"] = ids.masked_fill(mask == 0, -100)
    return made


# ---- cases ---------------------------------------------------------------------------------------------------------------


def minilm(dry: bool) -> tuple[nn.Module, Mapping[str, Batch]]:
    """all-MiniLM-L6-v2 with its own weights on the README's batch; and the same batch with every token real."""
    from examples.quickstart import load_minilm, sentences

    tokenizer, model = load_minilm()
    batch = dict(tokenizer(sentences(4 if dry else 32), padding=True, return_tensors="pt"))
    full = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    return model, {"README": batch, "1": full}


def _encoder(
    kind: str, batch: int, length: int, **more: Any
) -> Callable[[bool], tuple[nn.Module, Mapping[str, Batch]]]:
    def build(dry: bool) -> tuple[nn.Module, Mapping[str, Batch]]:
        import transformers

        sizes = (
            {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96}
            if dry
            else {}
        )
        given = {**more, **sizes, "attn_implementation": "sdpa"}
        config = getattr(transformers, f"{kind.removesuffix('ForMaskedLM')}Config")(**given)
        name = kind if kind.endswith("LM") else f"{kind}Model"
        model = getattr(transformers, name)(config)
        rows, width = (3, 24) if dry else (batch, length)
        return model, batches(rows, width, 1000, labels=kind.endswith("LM"))

    return build


def t5_small(dry: bool) -> tuple[nn.Module, Mapping[str, Batch]]:
    """The encoder of T5-small's sizes, with random weights that no gradient is asked of."""
    from transformers import T5Config, T5EncoderModel

    model = T5EncoderModel(T5Config(num_layers=2 if dry else 6, attn_implementation="sdpa")).requires_grad_(False)
    return model, batches(*((3, 24) if dry else (16, 128)), 1000, labels=False)


def t5(dry: bool) -> tuple[nn.Module, Mapping[str, Batch]]:
    from transformers import T5Config, T5EncoderModel

    sizes = {"d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 2, "num_heads": 2} if dry else {}
    base = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, **sizes}
    model = T5EncoderModel(T5Config(**base, attn_implementation="sdpa"))
    return model, batches(*((3, 24) if dry else (32, 512)), 1000, labels=False)


def llama(dry: bool) -> tuple[nn.Module, Mapping[str, Batch]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 4}
    if dry:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32000, use_cache=False, attn_implementation="sdpa"))
    return model, batches(*((3, 24) if dry else (8, 2048)), 1000, labels=True)


CPU: tuple[Case, ...] = (Case(name="MiniLM-L6-v2", build=minilm), Case(name="T5-small encoder", build=t5_small))
GPU: tuple[Case, ...] = (
    Case(name="BERT", build=_encoder("Bert", 32, 512)),
    Case(
        name="XLM-R",
        build=_encoder("XLMRoberta", 32, 512, max_position_embeddings=514, pad_token_id=1, vocab_size=250002),
    ),
    Case(name="ModernBERT", build=_encoder("ModernBert", 16, 2048)),
    Case(name="T5 encoder", build=t5),
    Case(
        name="BERT",
        build=_encoder("BertForMaskedLM", 32, 512, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        training=True,
    ),
    Case(name="Llama", build=llama, training=True),
)


# ---- measuring -----------------------------------------------------------------------------------------------------------


def _step(model: nn.Module, compiled: Any, batch: Batch, *, training: bool) -> Step:
    if not training:

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return harness.main_output(compiled(**batch))

        return forward

    def forward_backward() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        output = compiled(**batch)
        output.loss.backward()
        loss: torch.Tensor = output.loss.detach()
        return loss

    return forward_backward


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}


def _apart(found: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor) -> float:
    """The largest difference on real tokens, over the largest number."""
    if expected.dim() == 3:
        found, expected = found[mask.bool()], expected[mask.bool()]
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1e-12))


def _gradients_apart(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    largest = max(float(x.abs().max()) for x in expected.values())
    counted = {name: x for name, x in expected.items() if float(x.abs().max()) > _NOTHING * largest}
    return max(float((found[name] - x).abs().max() / x.abs().max()) for name, x in counted.items())


def measure(case: Case, device: str, *, dry: bool, seconds: float, clock: harness.CpuClock) -> Iterator[dict[str, str]]:
    """A row for each fill."""
    from torch._dynamo.utils import counters

    import attn_compiler

    torch._dynamo.reset()
    attn_compiler.reset()
    torch.manual_seed(0)
    model, made = case.build(dry)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = model.to(device, dtype).train(case.training)
    compiled = {side: torch.compile(model, dynamic=False, **given) for side, given in SIDES.items()}
    for padded in made.values():
        batch = {name: x.to(device) for name, x in padded.items()}
        mask = batch["attention_mask"]
        steps = {side: _step(model, one, batch, training=case.training) for side, one in compiled.items()}
        expected = _step(model, model, batch, training=case.training)()
        of_eager = _gradients(model)
        error = _apart(steps["unpad"](), expected, mask)
        of_ours = _gradients(model)
        for step in steps.values():
            step()
        counters.clear()
        times = harness.interleave(
            steps, device, seconds=seconds, min_rounds=1 if dry else 5, max_rounds=1 if dry else 200, clock=clock
        )
        yield {
            "case": case.name,
            "training": "yes" if case.training else "no",
            "dtype": str(dtype).removeprefix("torch."),
            "inputs": " x ".join(map(str, mask.shape)),
            "fill": f"{float(mask.float().mean()):.3f}",
            "error": f"{error:.2e}",
            "gradient_error": f"{_gradients_apart(of_ours, of_eager):.2e}" if case.training else "",
            "compilations": str(sum(counters["frames"].values())),
            **_timed(times),
            **_found(),
        }


def _timed(times: Mapping[str, list[float]]) -> dict[str, str]:
    middle = {side: statistics.median(times[side]) for side in SIDES}
    return {
        "rounds": str(len(times["unpad"])),
        **{f"{side}_p50_ms": f"{value:.4g}" for side, value in middle.items()},
        "over_inductor": f"{harness.ratio(times['inductor'], times['unpad']):.3f}",
        "over_padded": f"{harness.ratio(times['padded'], times['unpad']):.3f}",
    }


def _found() -> dict[str, str]:
    """What the last graph says that padding was to be taken out of."""
    import attn_compiler

    report = next((r for r in reversed(attn_compiler.reports()) if r.unpad is not None), None)
    kept = "nothing was compiled" if report is None else str((report.unpad and report.unpad.kept) or "")
    lowerings = [] if report is None else [site.decision.lowering for site in report.sites]
    return {"kept": kept, "lowerings": " ".join(dict.fromkeys(lowerings))}


def encode(device: str, *, dry: bool, seconds: float, clock: harness.CpuClock) -> Iterator[dict[str, str]]:
    """sentence-transformers' encode of all-MiniLM-L6-v2: the tokenizer, batches of 32 in the order of their lengths, and pooling."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules
    from torch._dynamo.utils import counters

    import attn_compiler
    from examples.quickstart import load_minilm, sentences

    torch._dynamo.reset()
    attn_compiler.reset()
    tokenizer, model = load_minilm()
    texts = sentences(8 if dry else 32) * 4
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)

        def embedder(**given: Any) -> Any:
            parts = [modules.Transformer(directory), modules.Pooling(model.config.hidden_size)]
            made = SentenceTransformer(modules=parts, device=device)
            if given:
                made.compile(dynamic=True, **given)
            return made

        embedders = {side: embedder(**given) for side, given in SIDES.items()}
        expected = torch.from_numpy(embedder().encode(texts))
    steps = {side: functools.partial(made.encode, texts) for side, made in embedders.items()}
    found = {side: torch.from_numpy(step()) for side, step in steps.items()}
    counters.clear()
    times = harness.interleave(
        steps, device, seconds=seconds, min_rounds=1 if dry else 5, max_rounds=1 if dry else 200, clock=clock
    )
    last = [step.fill for report in attn_compiler.reports() if report.unpad for step in report.unpad.last]
    yield {
        "case": ENCODE,
        "training": "no",
        "dtype": "float32",
        "inputs": f"{len(texts)} sentences",
        "fill": f"{statistics.mean(last):.3f}" if last else "",
        "error": f"{float((found['unpad'] - expected).abs().max() / expected.abs().max()):.2e}",
        "gradient_error": "",
        "compilations": str(sum(counters["frames"].values())),
        **_timed(times),
        **_found(),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny models of all cases of the device, on a CPU, one round"
    )
    parser.add_argument("--cases", nargs="+", help="names of cases, or parts of them; all if none is given")
    parser.add_argument("--seconds", type=float, default=20.0, help="timing of one row (default %(default)s)")
    parser.add_argument("--clock", choices=("wall", "process"), default="wall", help="of a CPU (default %(default)s)")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--append", action="store_true", help="to what is in the file")
    parser.add_argument("--commit", help="the commit to name in the rows, where this is no checkout")
    options = parser.parse_args()
    device = "cpu" if options.dry_run else options.device
    name = "unpad_dry.csv" if options.dry_run else "unpad_cpu.csv" if device == "cpu" else "unpad_h200.csv"
    where = harness.environment(device, options.commit)
    output = options.output or (Path(os.environ.get("TMPDIR", "/tmp")) if options.dry_run else RESULTS) / name
    file = harness.CsvFile(output, [*COLUMNS, *where], append=options.append)
    given: Any = {"dry": options.dry_run, "seconds": options.seconds, "clock": options.clock}
    rows: list[tuple[str, bool, Callable[[], Iterator[dict[str, str]]]]] = [
        (case.name, case.training, functools.partial(measure, case, device, **given))
        for case in (CPU if options.device == "cpu" else GPU)
    ]
    if options.device == "cpu":
        rows.append((ENCODE, False, functools.partial(encode, device, **given)))
    for name, training, made in rows:
        if options.cases and not any(part.lower() in name.lower() for part in options.cases):
            continue
        try:
            for row in made():
                file.add({**row, **where})
                print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        except Exception as error:  # noqa: BLE001 (one case that fails must not cost the others)
            failed = {"case": name, "training": "yes" if training else "no"}
            file.add({**failed, "failure": " ".join(f"{type(error).__name__}: {error}".split())[:400], **where})
            print(f"{name} failed: {error}", flush=True)


if __name__ == "__main__":
    main()
