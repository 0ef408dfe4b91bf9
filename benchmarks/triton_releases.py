"""Every family's kernels, compiled without a GPU by each release of Triton that they are known with.

    python -m benchmarks.triton_releases                 a cross-section, with each release; fails where a kernel got worse
    python -m benchmarks.triton_releases --all           every case
    python -m benchmarks.triton_releases --all --write   and keep what was found as benchmarks/results/triton_releases.csv
    python -m benchmarks.triton_releases --here          the installed release alone: rows on stdout

Releases that are not installed are laid beside torch, in build/triton, and kept there with what they compiled. A kernel got worse if it
does not compile, or takes more of the stack or of shared memory than the kept row says.

spilled: bytes of a thread's stack. shared: bytes of a block. nth: of the launches of a kernel in a case.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from attn_compiler.lowerings.shared.limits.triton_releases import Release

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "triton_releases.csv"
KEPT = ROOT / "build" / "triton"
#: what PyPI has of each release
WHEELS: dict[Release, str] = {(3, 6): "3.6.0", (3, 7): "3.7.1", (3, 8): "3.8.0", (3, 9): "3.9.0"}
#: which lowering launches a case, by how its name begins; the first that fits
LAUNCHED_BY = {
    "triton": "triton",
    "fp8": "triton_fp8",
    "round": "triton_fp8",
    "decode": "decode",
    "latent 128": "decode_latent_sm90",
    "latent": "decode_latent",
    "hopper half": "hopper",
    "hopper": "hopper_fp8",
}
#: of every lowering: what it does most, and what takes the most registers
SECTION = (
    "triton causal_64",
    "triton causal_256",
    "triton bias_hqk_64",
    "triton documents_64",
    "triton causal_128 forward sm80",
    "triton causal_128 grad_q sm120",
    "triton causal_64 grad_kv sm100",
    "fp8 causal_128 head",
    "fp8 keys_softcap_128 accurate",
    "round 64 rotated",
    "decode head_dim_64",
    "decode fp8",
    "decode queries",
    "decode head_dim_64 sm80",
    "latent 16",
    "latent 128",
    "hopper causal_128 head",
    "hopper softcap_sinks_64 head",
    "hopper half documents_64",
    "hopper half causal_192_128",
    "hopper half grad_causal_128",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kernel of one case. torch, triton: the versions."""

    torch: str
    triton: str
    lowering: str
    case: str
    kernel: str
    nth: int
    registers: int
    spilled: int
    shared: int


def lowering_of(case: str) -> str:
    return next(lowering for begin, lowering in LAUNCHED_BY.items() if case.startswith(begin))


def cases() -> list[str]:
    """For sm90 those of `kernel_code`; for other architectures, whose name is their last word, those that tests compile."""
    from benchmarks import kernel_code

    return [*kernel_code.names(), *_elsewhere()]


def _elsewhere() -> dict[str, tuple[str, ...]]:
    from tests.lowerings.decode.kernels import compiling as decode
    from tests.lowerings.triton.kernels import compiling

    plain = {f"triton {case} {kernel} sm{sm}": (case, kernel) for case, kernel, sm in compiling.JOBS if sm != 90}
    return plain | {f"decode {case} sm{sm}": (case,) for case, sm in decode.JOBS if sm != 90}


def compiled(case: str) -> list[Row]:
    """By the Triton of this process."""
    import torch
    import triton

    versions = {"torch": str(torch.__version__), "triton": str(triton.__version__)}
    named = {**versions, "lowering": lowering_of(case), "case": case}
    if " sm" not in case:
        from benchmarks import kernel_code

        return [
            Row(
                **named,
                kernel=found.kernel,
                nth=found.nth,
                registers=found.registers,
                spilled=found.stack,
                shared=found.shared,
            )
            for found in kernel_code.code_of(case)
        ]
    found, kernel = _compiled_elsewhere(case)
    return [Row(**named, kernel=kernel, nth=0, registers=found.registers, spilled=found.spilled, shared=found.shared)]


def _compiled_elsewhere(case: str) -> tuple[Any, str]:
    from tests.lowerings.decode.kernels import compiling as decode
    from tests.lowerings.triton.kernels import compiling

    job, sm = _elsewhere()[case], int(case.rpartition(" sm")[2])
    if len(job) == 1:
        return decode.run((*job, sm)), "attention_decode"
    return compiling.run((*job, sm)), f"attention_{job[1]}"


def here(wanted: Sequence[str], processes: int) -> list[Row]:
    with ProcessPoolExecutor(max_workers=processes) as pool:
        return [row for found in pool.map(compiled, wanted) for row in found]


def beside(release: Release, arguments: Sequence[str]) -> list[dict[str, str]]:
    """What `--here` says with that release. Raises CalledProcessError if a kernel did not compile."""
    command = [sys.executable, "-m", "benchmarks.triton_releases", "--here", *arguments]
    environment = environment_of(release)
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return list(csv.DictReader(done.stdout.splitlines()))


def environment_of(release: Release) -> dict[str, str]:
    """Of a process that has that release beside torch, which is fetched unless it is there."""
    version = WHEELS[release]
    folder = KEPT / version
    if not (folder / "triton").is_dir():
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder))
        subprocess.run([*pip, f"triton=={version}"], check=True)
    path = os.pathsep.join((str(ROOT), str(folder)))
    return {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(KEPT / f"cache-{version}")}


def worse(kept: Iterable[Mapping[str, str]], found: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """A line for each kernel that takes more than its kept row says, or of the cross-section and has none."""
    before = {_key(row): row for row in kept}
    for row in found:
        old = before.get(_key(row))
        name = f"Triton {row['triton']}, {row['case']}, {row['kernel']} {row['nth']}"
        if old is None:
            if row["case"] in SECTION:
                yield f"{name}: no such row was kept"
            continue
        for column in ("spilled", "shared"):
            if int(row[column]) > int(old[column]):
                yield f"{name}: {column} {old[column]} became {row[column]}"


def _key(row: Mapping[str, str]) -> tuple[str, ...]:
    return row["triton"], row["case"], row["kernel"], row["nth"]


def kept() -> list[dict[str, str]]:
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(file: Any, kind: type[Any], rows: Iterable[Mapping[str, Any]]) -> None:
    """As CSV. kind: a dataclass, whose fields are the columns."""
    writer = csv.DictWriter(file, [field.name for field in fields(kind)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every case, and not the cross-section alone")
    parser.add_argument("--here", action="store_true", help="with the installed Triton, to stdout")
    parser.add_argument("--write", action="store_true", help="keep the rows")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if options.here:
        write(sys.stdout, Row, map(asdict, here(cases() if options.all else SECTION, options.processes)))
        return
    arguments = ["--processes", str(options.processes), *(["--all"] if options.all else [])]
    found = [row for release in WHEELS for row in beside(release, arguments)]
    if options.write:
        with RESULTS.open("w", encoding="utf-8", newline="") as file:
            write(file, Row, found)
        return
    said = list(worse(kept(), found))
    print("\n".join([*said, f"{len(found)} kernels compiled, {len(said)} of them worse than kept"]))
    sys.exit(bool(said))


if __name__ == "__main__":
    main()
