"""Compiles what one call will launch before it does, for a GPU that is not there: python -m tests.lowerings.hopper.compiled_ahead

In a process of its own, since Triton's interpreter, which the other tests use, compiles nothing.
"""

from __future__ import annotations

import json
import sys
import tempfile
import types
from unittest import mock

import torch
import triton

from attn_compiler.lowerings.hopper import launch
from attn_compiler.lowerings.shared import ahead, compiling, imagined
from attn_compiler.lowerings.shared.kernel_plan import Band
from attn_compiler.target import Target
from benchmarks.kernel_code import _Driver
from tests.lowerings.hopper import problems
from tests.lowerings.kernel_cases import Case
from tests.lowerings.kernel_problems import planned

_CASE = Case(
    name="hopper ahead", seqlen_q=256, seqlen_kv=256, head_dim=64, keys="left", band=Band(right=0), needs_grad=False
)


def main() -> None:
    triton.runtime.driver.set_active(_Driver())
    problem = problems.build(_CASE, dtype=torch.bfloat16, device="cpu", target=Target.fake())
    given = (problem.q, problem.k, problem.v, problems.operands(problem), problem.text)
    call = ahead.Call(body=launch.forward, arguments=imagined.described(given), named=())
    properties = types.SimpleNamespace(multi_processor_count=132)
    machine = mock.patch.object(torch.cuda, "get_device_properties", return_value=properties)
    left: list[compiling.Asked] = []
    with tempfile.TemporaryDirectory() as folder, planned(problem.plan), machine:
        triton.knobs.cache.dir = folder
        first = ahead.Ahead(begin=compiling.workers(2).begin)
        ahead.note_launches(call, first.note)
        begun = [future.result().kernel for future in first.started]
        ahead.note_launches(call, lambda *asked: left.extend(compiling.variants(*asked)))
    json.dump([{"begun": begun, "left": [str(asked.key) for asked in left]}], sys.stdout)


if __name__ == "__main__":
    main()
