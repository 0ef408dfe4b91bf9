"""Tests of what our kernels compute, in the interpreter of each release of Triton that they are known with. No GPU is needed.

    python -m benchmarks.triton_interpreted              with each release beside the installed torch: rows on stdout
    python -m benchmarks.triton_interpreted --here       with the installed Triton, which is the one of the installed torch

The tests compare with float64. Gluon's kernels have no interpreter. Triton 3.6's own fails with NumPy 2.4 and newer, which makes no number
of an array of one: lay NumPy 2.3 beside it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.triton_releases import ROOT, WHEELS, environment_of, write

#: of each lowering the tests that run its kernels
TESTS = {
    "triton": ("tests/lowerings/triton/test_launch.py",),
    "triton_fp8": ("tests/lowerings/triton/test_fp8.py",),
    "decode": ("tests/lowerings/decode/kernels/test_decode.py",),
    "decode_latent": ("tests/lowerings/decode/kernels/test_decode_latent.py",),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """torch, triton: the versions. Tests that need a GPU are skipped, and not counted."""

    torch: str
    triton: str
    lowering: str
    passed: int
    failed: int


def run(triton: str, environment: dict[str, str], lowering: str) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={said}", *TESTS[lowering]]
        subprocess.run(command, env=environment, cwd=ROOT, check=False, stdout=sys.stderr)
        counts = counted(ElementTree.parse(said).getroot())
    failed = counts["failure"] + counts["error"]
    return Row(
        torch=metadata.version("torch"), triton=triton, lowering=lowering, passed=counts["passed"], failed=failed
    )


def counted(tests: ElementTree.Element) -> Counter[str]:
    """Of pytest's report, how each test ended."""
    ends = (
        next((end.tag for end in test if end.tag in ("failure", "error", "skipped")), "passed")
        for test in tests.iter("testcase")
    )
    return Counter(ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--here", action="store_true", help="with the installed Triton alone")
    parser.add_argument("--lowering", choices=TESTS, action="append", help="of these alone")
    options = parser.parse_args()
    if options.here:
        beside = {metadata.version("triton"): {**os.environ, "PYTHONPATH": str(ROOT)}}
    else:
        beside = {version: environment_of(release) for release, version in WHEELS.items()}
    wanted = options.lowering or TESTS
    rows = [run(triton, environment, lowering) for triton, environment in beside.items() for lowering in wanted]
    write(sys.stdout, Row, map(asdict, rows))


if __name__ == "__main__":
    main()
