"""Lines by feature, counted by path: python -m tests.feature_lines"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.imports import ROOT

COLUMNS = ("attn_compiler", "tests", "benchmarks", "docs")

#: feature -> what a path of it holds. The first match counts.
FEATURES: Mapping[str, str] = {
    "FP8": r"fp8|rotation\.py|tuples_round|rounding|quantise|restoring",
    "linear attention": r"linear(?!_forms\.py|ise)|scan_ops|_recurrence|recall",
    "context parallelism": r"context_parallel|first_look|collectives|halo|rank|merging|merge_ops|meshes|lse_op|rings?_",
    "unpad": r"unpad|batches_before|torch_private/packed|recovering/packing|padded_rules|planted/padding",
    "decode and MLA": r"latent|absorbed|mla|rotary_tables|decod",
    "wide heads": r"wide",
    "shared sequences": r"shared_sequence",
    "verify": r"verif",
    "fuzz": r"tests/fuzz",
    "near misses": r"tests/near_miss",
    "reports, page, CLI, site": r"reporting|reasons|__main__|explaining|website|test_main",
    "compare": r"comparing|compare",
    "flex": r"flex|block_masks",
    "varlen and flash-attn calls": r"library|varlen|nested_calls|whole_calls|opaque_calls|arrange",
    "DTensor": r"dtensor|distributed",
    "export": r"export|packaged",
    "warm starts": r"rewrites|fragment|store\.py|warm|caches|remember|first_step|compile_cost",
    "rows without keys": r"keyless",
    "time_kernels": r"time_kernels|choice/timed",
    "fa4": r"fa4",
    "rows on a CPU": r"lowerings/rows",
    "cuDNN": r"cudnn",
    "Hopper": r"hopper|sm90",
    "integrations": r"integrations",
    "checkpoints": r"checkpoint",
    "borders of graphs": r"border|body_inputs|buffers|bodies",
    "choice": r"lowerings/choice|select_rows|bench_select|priorities",
    "launching": r"shared/launching|shared/calls",
    "Triton and shared kernels": r"lowerings/triton|shared/kernels",
    "other lowerings": r"lowerings/",
    "index expressions": r"index_expr",
    "recovering": r"recovering",
    "matching": r"matching",
    "spelling": r"spelling",
    "graph, pipeline, writing": r"passes/",
    "models of transformers": r"tests/hf",
    "gate": r"gate",
    "everything else": r"",
}


def counted(root: Path = ROOT) -> dict[str, Counter[str]]:
    """Lines of Python by feature and folder, and words of the docs."""
    found = {feature: Counter[str]() for feature in FEATURES}
    for folder, path in _files(root):
        text = path.read_text()
        size = len(text.split()) if folder == "docs" else len(text.splitlines())
        found[feature_of(path.relative_to(root).as_posix())][folder] += size
    return found


def feature_of(path: str) -> str:
    """The feature that a path belongs to."""
    return next(feature for feature, pattern in FEATURES.items() if re.search(pattern, path))


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    for folder in COLUMNS:
        suffix = "md" if folder == "docs" else "py"
        yield from ((folder, path) for path in sorted((root / folder).rglob(f"*.{suffix}")))


def table(found: Mapping[str, Counter[str]], columns: Sequence[str] = COLUMNS) -> Table:
    """The counts for people, with their sums."""
    made = Table("feature", *columns[:-1], f"{columns[-1]} (words)")
    for feature, counts in found.items():
        made.add_row(feature, *(f"{counts[column]:,}" if counts[column] else "" for column in columns))
    total = sum(found.values(), Counter[str]())
    made.add_row("all", *(f"{total[column]:,}" for column in columns), style="bold")
    return made


if __name__ == "__main__":
    Console().print(table(counted()))
