"""What the cases of benchmarks.kernel_code launch, and what some of them are compiled to: python -m tests.gate.kernels launches|code

Prints JSON. In a process of its own, since Triton's interpreter, which the other tests use, compiles nothing.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from benchmarks import kernel_code

#: Of every family of kernels one: our Triton kernels forward and backward, Hopper's, decoding over a latent, of few heads and of many.
COMPILED = ("triton keys_128", "hopper half causal_128", "latent 16", "latent 128")


def launches() -> list[dict[str, Any]]:
    return [dataclasses.asdict(launch) for case in kernel_code.names() for launch in kernel_code.launches_of(case)]


def code(cases: tuple[str, ...] = COMPILED) -> list[dict[str, Any]]:
    return [dataclasses.asdict(found) for case in cases for found in kernel_code.code_of(case)]


if __name__ == "__main__":
    json.dump({"launches": launches, "code": code}[sys.argv[1]](), sys.stdout)
