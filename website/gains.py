"""What was gained, as tables of Markdown: README's, and those of docs/gain.md. All figures are rows of benchmarks/results.

python -m website.gains prints README's table.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Row = Mapping[str, str]

#: what README's table says of a device that is no H200
_CARDS = {"NVIDIA H200": "", "AMD EPYC": ", one CPU thread"}
#: lowerings that `pip install` of this package does not bring
_OPTIONAL = frozenset({"fa4", "cudnn"})
#: sides of embed_cpu.csv
_EMBED = {
    "attn_compiler": "ours",
    "inductor": "Inductor",
    "openvino": "OpenVINO",
    "onnxruntime": "ONNX Runtime",
    "ctranslate2": "CTranslate2",
}
#: of bench_memory.py
_MEMORY = "memory_h200"


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of README's table. model, call: in words. wanted: what says which row it is. ours, theirs, gain: columns."""

    model: str
    call: str
    file: str
    wanted: Mapping[str, str]
    ours: str = "attn_compiler_p50_ms"
    theirs: str = "inductor_p50_ms"
    gain: str = "ratio"


def _of_h200(model: str, call: str, /, **wanted: str) -> Line:
    return Line(model=model, call=call, file="h200", wanted=wanted)


README: tuple[Line, ...] = (
    _of_h200("gpt-oss", "prefill, padded, eager", model="gpt_oss", implementation="eager", scenario="prefill_padded"),
    _of_h200("Gemma 4", "training step, padded", model="gemma4", implementation="sdpa", scenario="train_padded"),
    _of_h200("Llama", "training step, padded, 2 x 4096", model="llama", implementation="sdpa", scenario="train_padded"),
    _of_h200("BERT", "inference, padded", model="bert", implementation="sdpa", scenario="prefill_padded"),
    Line(
        model="all-MiniLM-L6-v2",
        call="32 sentences, 53% padding, `unpad`",
        file="unpad_cpu",
        wanted={"case": "MiniLM-L6-v2", "fill": "0.465"},
        ours="unpad_p50_ms",
        gain="over_inductor",
    ),
)


def rows_of(name: str) -> list[dict[str, str]]:
    with (RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def has_gain(row: Row) -> bool:
    """Whether it was timed, and what it gave was right: a wrong result has no gain."""
    return bool(row["ratio"]) and row.get("numerics") != "WRONG"


def row_of(name: str, **wanted: str) -> Row:
    """The one row of a CSV that has these values. Raises ValueError where there is none, or several."""
    found = _matching(name, wanted)
    if len(found) != 1:
        raise ValueError(f"{name}.csv has {len(found)} rows with {wanted}")
    return found[0]


def _matching(name: str, wanted: Mapping[str, str]) -> list[dict[str, str]]:
    return [row for row in rows_of(name) if all(row[key] == value for key, value in wanted.items())]


def readme() -> Iterator[str]:
    """README's table, in the order of the gain; with peak memory, if that was measured."""
    peaks = (RESULTS / f"{_MEMORY}.csv").is_file()
    heads = ["model", "call", "Inductor, ms", "ours, ms", "gain", *(["peak memory, GiB"] if peaks else [])]
    yield _cells(heads)
    yield "|---" * len(heads) + "|"
    measured = [(line, row_of(line.file, **line.wanted)) for line in README]
    for line, row in sorted(measured, key=lambda each: -float(each[1][each[0].gain])):
        yield _cells([*_line(line, row), *([_peaks(line)] if peaks else [])])


def _line(line: Line, row: Row) -> list[str]:
    gain = f"[{float(row[line.gain]):.2f}x](benchmarks/results/{line.file}.csv)"
    times = (f"{float(row[line.theirs]):.3g}", f"{float(row[line.ours]):.3g}")
    return [line.model, line.call + _CARDS[row["device"]], *times, gain]


def _peaks(line: Line) -> str:
    """Inductor's and ours, weights included, in GiB; "" where nobody measured them."""
    if line.file != "h200" or not _matching(_MEMORY, line.wanted):
        return ""
    row = row_of(_MEMORY, **line.wanted)
    sides = (row[f"{side}_peak_mib"] for side in ("inductor", "attn_compiler"))
    both = " → ".join(f"{float(mib) / 1024:.{1 if float(mib) >= 1024 else 2}f}" for mib in sides if mib)
    return f"[{both}](benchmarks/results/{_MEMORY}.csv)" if "→" in both else ""


def _cells(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def embedding() -> Iterator[str]:
    """Of embed_cpu.csv: `encode` by each library at its fastest, with its error, in each class of error."""
    for precision, words in (("exact", "float32"), ("bfloat16", "bfloat16"), ("int8", "int8")):
        wanted = {"length": "0", "precision": precision, "device": "AMD EPYC"}
        rows = [row for row in _matching("embed_cpu", wanted) if row["p50_ms"]]
        best: dict[str, Row] = {}
        for row in sorted(rows, key=lambda row: float(row["p50_ms"])):
            best.setdefault(row["side"].split()[0], row)
        found = (
            f"{_EMBED[name]} {float(row['p50_ms']):.0f} ms ({float(row['error']):.0e})"
            for name, row in best.items()
            if name in _EMBED
        )
        yield f"- {words}: {', '.join(found)}"


def beside_flex() -> str:
    """Of flex_h200.csv: how many cases, the smallest gain and the largest."""
    ratios = [float(row["ratio"]) for row in rows_of("flex_h200") if row["ratio"]]
    return f"{min(ratios):.2f} to {max(ratios):.2f} times as fast in {len(ratios)} cases"


def summary(name: str) -> str:
    """Of a CSV of whole models: the geometric mean, how many cases, the slowest, and how many ran kernels of optional packages."""
    every = rows_of(name)
    rows = [row for row in every if has_gain(row)]
    ratios = [float(row["ratio"]) for row in rows]
    optional = sum(not _OPTIONAL.isdisjoint(row["lowerings"].split()) for row in rows)
    mean = f"{statistics.geometric_mean(ratios):.2f}x over {len(rows)}{f' of {len(every)}' * (every != rows)} cases"
    kernels = f"optional kernels in {optional}" if optional else "no optional kernels"
    return f"geometric mean {mean}, slowest {min(ratios):.2f}x, {kernels}"


MODELS = {
    "llama": "Llama", "qwen3": "Qwen3", "mistral": "Mistral", "gemma2": "Gemma 2", "gpt2": "GPT-2", "bert": "BERT", "vit": "ViT",
    "whisper": "Whisper", "t5": "T5", "bloom": "Bloom", "gpt_oss": "gpt-oss", "gemma4": "Gemma 4", "sam": "SAM",
    "qwen3_vl_vision": "Qwen3-VL's tower",
}  # fmt: skip
CALLS = {
    "prefill": "inference",
    "prefill_padded": "inference, padded",
    "train": "training",
    "train_padded": "training, padded",
    "train_checkpointed": "training, checkpoints",
}


def measured(implementation: str) -> Iterator[str]:
    """A line for each model of h200.csv, and a column for each call."""
    rows = [row for row in rows_of("h200") if row["implementation"] == implementation]
    yield f"| model | {' | '.join(CALLS.values())} |"
    yield "|---|" + "---|" * len(CALLS)
    for name, words in MODELS.items():
        found = {
            row["scenario"]: f"{float(row['ratio']):.2f}x" for row in rows if row["model"] == name and has_gain(row)
        }
        if found:
            yield f"| {words} | {' | '.join(found.get(call, '') for call in CALLS)} |"


#: of the table of dense masks
_HEAD_DIMS, _LENGTHS = (64, 128, 256), (512, 2048, 8192, 32768)


def dense_mask() -> Iterator[str]:
    """Of select_h200.csv, by head dim and length: PyTorch's causal attention with its mask as a tensor over the same without one, forward
    and backward."""
    times = {
        (row["case"], row["pass"], row["side"]): float(row["p50_us"]) for row in rows_of("select_h200") if row["p50_us"]
    }
    yield f"| head dim | {' | '.join(f'{length} positions' for length in _LENGTHS)} |"
    yield "|---|" + "---|" * len(_LENGTHS)
    for dim in _HEAD_DIMS:
        cells = []
        for case in (f"causal_d{dim}_s{length}" for length in _LENGTHS):
            ratios = (times[case, which, "presented"] / times[case, which, "sdpa"] for which in ("forward", "backward"))
            cells.append(" / ".join(f"{ratio:.1f}x" for ratio in ratios))
        yield f"| {dim} | {' | '.join(cells)} |"


#: columns of docs/models.csv, and the cards that they stand for
CHOSEN_FOR = {"sm80": "A100", "sm89": "L4, RTX 4090", "sm90": "H100, H200", "sm100": "B200"}


def chosen() -> Iterator[str]:
    """Of docs/models.csv: for each machine, how many attentions get a kernel of ours, one of PyTorch's, and none."""
    with (ROOT / "docs" / "models.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    yield "| card | our kernels | PyTorch's | PyTorch's, dense mask | as it was | measured |"
    yield "|---|---|---|---|---|---|"
    for sm, cards in CHOSEN_FOR.items():
        counts = Counter[str]()
        for name, count in (each for row in rows for each in _lowerings(row[sm])):
            counts[_kind(name)] += count
        shares = (f"{counts[kind] / counts.total():.0%}" for kind in ("ours", "pinned", "dense", "none"))
        yield f"| {cards} | {' | '.join(shares)} | {'H200' if sm == 'sm90' else 'no'} |"


def _kind(lowering: str) -> str:
    if lowering == "untouched":
        return "none"
    if not lowering.startswith("sdpa_"):
        return "ours"
    return "dense" if lowering.endswith("*") else "pinned"


def _lowerings(cell: str) -> Iterator[tuple[str, int]]:
    """Read "hopper x 1; triton x 1"."""
    for part in filter(None, cell.split("; ")):
        name, _, count = part.partition(" x ")
        yield name, int(count)


if __name__ == "__main__":
    sys.stdout.write("\n".join(readme()) + "\n")
