"""What is decided for many sites on many machines, as a table.

    python -m tests.lowerings.golden_decisions > tests/lowerings/golden_decisions.csv

A change of the code that is not meant to change decisions leaves the table as it is. One that is shows up in the difference.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import sys
from collections.abc import Iterator
from typing import TextIO

from attn_compiler.fp8_recipe import Fp8Recipe
from attn_compiler.options import Options
from attn_compiler.passes.select import decide
from attn_compiler.spec import AttentionSpec
from attn_compiler.target import Target
from benchmarks import select_cases
from tests import cases

#: hexadecimal digits of a digest
_DIGITS = 8

TARGETS: dict[str, Target] = {
    "cpu": Target.fake(device="cpu"),
    "sm80": Target.fake(sm=80),
    "sm89": Target.fake(sm=89),
    "sm90": Target.fake(),
    "sm90_torch_2.11": Target.fake(torch="2.11.0", triton="3.6.0"),
    "sm90_cudnn_frontend": Target.fake(cudnn_frontend="1.23.0"),
    "sm90_fa4": Target.fake(flash_attn_4="4.0.0b36"),
    "sm100": Target.fake(sm=100, cudnn_frontend="1.23.0"),
}


def specs() -> Iterator[tuple[str, AttentionSpec]]:
    """(name, spec): the cases that kernels are tested with and those that the order of lowerings was measured on."""
    for case in cases.CASES:
        for needs_grad in (False, True):
            yield f"{case.name}{'_training' if needs_grad else ''}", cases.build(case, needs_grad=needs_grad).spec
    for measured in select_cases.CASES:
        for training in (False, True):
            spec = select_cases.spec_of(measured, training=training)
            yield f"measured_{measured.name}{'_training' if training else ''}", spec
            if not training:
                yield f"measured_{measured.name}_fp8", dataclasses.replace(spec, fp8=Fp8Recipe())


def decided(spec: AttentionSpec, target: Target) -> str:
    """The lowering, and a digest of all that was refused and why."""
    decision = decide(dataclasses.replace(spec, device=target.device), target, Options())
    said = repr([(refusal.lowering, refusal.reasons) for refusal in decision.refusals])
    return f"{decision.lowering} {hashlib.sha256(said.encode()).hexdigest()[:_DIGITS]}"


def write(file: TextIO) -> None:
    table = csv.writer(file, lineterminator="\n")
    table.writerow(["spec", *TARGETS])
    for name, spec in specs():
        table.writerow([name, *(decided(spec, target) for target in TARGETS.values())])


if __name__ == "__main__":
    write(sys.stdout)
