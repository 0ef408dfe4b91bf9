"""Compiles what one call will launch before it does, for a GPU that is not there: python -m tests.lowerings.hopper.compiled_ahead

In a process of its own, since Triton's interpreter, which the other tests use, compiles nothing.
"""

from __future__ import annotations

import json
import sys
import tempfile
import types
from typing import Any
from unittest import mock

import torch
import triton

from attn_compiler.lowerings.hopper import backward_launch, launch
from attn_compiler.lowerings.shared.launching import ahead, compiling, dry_tensors
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from attn_compiler.spec.target import Target
from benchmarks.kernel_code import _Driver
from tests.lowerings.hopper import problems
from tests.lowerings.kernel_cases import Case
from tests.lowerings.kernel_problems import planned

_CASE = Case(name="hopper ahead", seqlen_q=256, seqlen_kv=256, head_dim=64, keys="left", band=Band(right=0))

_BIASED = Case(name="hopper ahead, bias", seqlen_q=256, seqlen_kv=256, head_dim=64, bias="hqk", needs_grad=False)


def _biased() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    problem = problems.build(_BIASED, dtype=torch.bfloat16, device="cpu", target=Target.fake())
    given = (problem.q, problem.k, problem.v, problems.operands(problem), problem.text)
    return {"forward, bias": (launch.forward, given)}


def _calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Bodies and their arguments."""
    problem = problems.build(_CASE, dtype=torch.bfloat16, device="cpu", target=Target.fake())
    given = (problem.q, problem.k, problem.v)
    out, lse = torch.empty_like(problem.q), torch.empty(problem.q.shape[:3])
    read = (*given, problems.grad_operands(problem), out, lse, problem.text)
    return {
        "forward": (launch.forward, (*given, problems.operands(problem), problem.text)),
        "backward": (backward_launch.gradients, (out, lse, *read)),
        "in order": (backward_launch.gradients_in_order, (out, lse, *read)),
    }


def _begun(body: Any, given: tuple[Any, ...]) -> dict[str, Any]:
    """The kernels that are begun for a call, and what it would compile after that."""
    call = ahead.LaunchingCall(body=body, arguments=dry_tensors.described(given), named=())
    left: list[compiling.Asked] = []
    first = ahead.Ahead(begin=compiling.workers(2).begin)
    ahead.note_launches(call, first.note)
    begun = [future.result().kernel for future in first.started]
    ahead.note_launches(call, lambda *asked: left.extend(compiling.variants(*asked)))
    return {"begun": begun, "left": [str(asked.key) for asked in left]}


def main() -> None:
    triton.runtime.driver.set_active(_Driver())
    properties = types.SimpleNamespace(multi_processor_count=132)
    machine = mock.patch.object(torch.cuda, "get_device_properties", return_value=properties)
    found = []
    with tempfile.TemporaryDirectory() as folder, machine:
        triton.knobs.cache.dir = folder
        for case, calls in ((_CASE, _calls), (_BIASED, _biased)):
            with planned(case.plan):
                found += [{"name": name, **_begun(*call)} for name, call in calls().items()]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
