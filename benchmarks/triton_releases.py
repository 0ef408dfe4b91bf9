"""Every family's kernels, compiled without a GPU by each release of Triton that they are known with.

    python -m benchmarks.triton_releases                 a cross-section, with each release; fails where a kernel got worse
    python -m benchmarks.triton_releases --all           every case
    python -m benchmarks.triton_releases --all --write   and keep what was found as benchmarks/results/triton_releases.csv
    python -m benchmarks.triton_releases --here          the installed release alone: rows on stdout

Releases that are not installed are laid beside torch, in build/triton, and kept there with what they compiled. A kernel got worse if it
does not compile, or takes more of the stack or of shared memory than the kept row says.

    python -m benchmarks.triton_releases --interpreted     tests of what our kernels compute, in each release's interpreter: rows on stdout

Those compare with float64. Gluon's kernels have no interpreter. Triton 3.6's own fails with NumPy 2.4 and newer, which makes no number of
an array of one: lay NumPy 2.3 beside it.

spilled: bytes of a thread's stack. shared: bytes of a block. nth: of the launches of a kernel in a case.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from attn_compiler.lowerings.shared.limits.triton_releases import Release
from benchmarks.harness import arg, command

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "triton_releases.csv"
KEPT = ROOT / "build" / "triton"
#: what PyPI has of each release
WHEELS: dict[Release, str] = {(3, 6): "3.6.0", (3, 7): "3.7.1", (3, 8): "3.8.0", (3, 9): "3.9.0"}
#: which lowering launches a case, by how its name begins; the first that fits
LAUNCHED_BY = {
    "triton": "triton", "round": "hopper_fp8", "decode": "decode",
    "latent 128": "decode_latent_sm90", "latent": "decode_latent", "hopper half": "hopper", "hopper": "hopper_fp8",
}  # fmt: skip
#: of every lowering: what it does most, and what takes the most registers
SECTION = (
    "triton causal_64", "triton causal_256", "triton bias_hqk_64", "triton documents_64",
    "triton causal_128 forward sm80", "triton causal_128 grad_q sm120", "triton causal_64 grad_kv sm100",
    "round 64 rotated", "decode head_dim_64", "decode fp8",
    "decode queries", "decode head_dim_64 sm80", "latent 16", "latent 128", "hopper causal_128 head",
    "hopper softcap_sinks_64 head", "hopper half documents_64", "hopper half causal_192_128",
    "hopper half grad_causal_128",
)  # fmt: skip


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


#: of each lowering the tests that run its kernels
TESTS = {
    "triton": ("tests/lowerings/triton/test_launch.py",),
    "decode": ("tests/lowerings/decode/kernels/test_decode.py",),
    "decode_latent": ("tests/lowerings/decode/kernels/test_decode_latent.py",),
}


@dataclass(frozen=True, kw_only=True)
class Interpreted:
    """torch, triton: the versions. Tests that need a GPU are skipped, and not counted."""

    torch: str
    triton: str
    lowering: str
    passed: int
    failed: int


def interpreted(triton: str, environment: dict[str, str], lowering: str) -> Interpreted:
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={said}", *TESTS[lowering]]
        subprocess.run(command, env=environment, cwd=ROOT, check=False, stdout=sys.stderr)
        counts = counted(ElementTree.parse(said).getroot())
    failed = counts["failure"] + counts["error"]
    return Interpreted(
        torch=metadata.version("torch"), triton=triton, lowering=lowering, passed=counts["passed"], failed=failed
    )


def counted(tests: ElementTree.Element) -> Counter[str]:
    """Of pytest's report, how each test ended."""
    ends = (
        next((end.tag for end in test if end.tag in ("failure", "error", "skipped")), "passed")
        for test in tests.iter("testcase")
    )
    return Counter(ends)


@command(
    __doc__,
    arg("--all", action="store_true", help="every case, and not the cross-section alone"),
    arg("--here", action="store_true", help="with the installed Triton, to stdout"),
    arg("--write", action="store_true", help="keep the rows"),
    arg("--interpreted", action="store_true", help="tests of what kernels compute, to stdout"),
    arg("--lowering", choices=TESTS, action="append", help="for --interpreted: of these alone"),
    arg("--processes", type=int, default=2),
)
def main(given: Namespace) -> int:
    if given.interpreted:
        here_alone = {metadata.version("triton"): {**os.environ, "PYTHONPATH": str(ROOT)}}
        every = here_alone if given.here else {version: environment_of(release) for release, version in WHEELS.items()}
        wanted = given.lowering or TESTS
        found = [interpreted(triton, environment, each) for triton, environment in every.items() for each in wanted]
        write(sys.stdout, Interpreted, map(asdict, found))
        return 0
    if given.here:
        write(sys.stdout, Row, map(asdict, here(cases() if given.all else SECTION, given.processes)))
        return 0
    arguments = ["--processes", str(given.processes), *(["--all"] if given.all else [])]
    found = [row for release in WHEELS for row in beside(release, arguments)]
    if given.write:
        with RESULTS.open("w", encoding="utf-8", newline="") as file:
            write(file, Row, found)
        return 0
    said = list(worse(kept(), found))
    print("\n".join([*said, f"{len(found)} kernels compiled, {len(said)} of them worse than kept"]))
    return int(bool(said))


if __name__ == "__main__":
    sys.exit(main())
