"""Which variants of kernels calls of 50 lengths want, by a text whose sizes are symbolic: python -m tests.lowerings.hopper.any_size

In a process of its own, since Triton's interpreter, which the other tests use, has no variants. Nothing is compiled: Triton says what it
would compile.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import triton

from attn_compiler.lowerings.hopper import backward_launch, launch
from attn_compiler.lowerings.shared.launching import ahead, compiling, dry_tensors
from attn_compiler.lowerings.shared.ops.leaf_ops import empty_outputs
from attn_compiler.lowerings.shared.parts.kernel_plan import Band, Call
from attn_compiler.spec.target import Target
from benchmarks.kernel_code import _Driver
from tests.lowerings.hopper import problems
from tests.lowerings.kernel_cases import Case
from tests.lowerings.kernel_problems import Problem, planned

#: one multiple of 16 and another length come first, as the graph of symbolic sizes compiles for both
LENGTHS = (64, 65, *random.Random(0).sample(range(2, 900), 48))
_SIZES: Any = {"heads_q": 4, "heads_kv": 2}
CASES = (
    Case(name="padded 64", head_dim=64, keys="left", **_SIZES),
    Case(name="padded causal 128", head_dim=128, keys="right", band=Band(right=0), **_SIZES),
    Case(name="causal 128", head_dim=128, band=Band(right=0), **_SIZES),
    Case(name="window 64, sinks", head_dim=64, keys="left", band=Band(left=40, right=0), sinks=True, **_SIZES),
    Case(name="softcap 128", head_dim=128, softcap=20.0, keys="left", band=Band(right=0), **_SIZES),
)


def _of_any_length(problem: Problem) -> str:
    call = Call.from_text(problem.text)
    batch, heads, _, width = call.spec.q.shape
    q = dataclasses.replace(call.spec.q, shape=(batch, heads, "s0", width))
    return dataclasses.replace(call, spec=dataclasses.replace(call.spec, q=q)).to_text()


def _calls(problem: Problem, text: str) -> Iterator[ahead.LaunchingCall]:
    given = [x.detach() for x in (problem.q, problem.k, problem.v)]
    read, of_gradients = ([x.detach() for x in f(problem)] for f in (problems.operands, problems.grad_operands))
    out, lse = empty_outputs(given[0], given[2])
    for body, arguments in (
        (launch.forward, (*given, read, text)),
        (backward_launch.gradients, (out, lse, *given, of_gradients, out, lse, text)),
    ):
        yield ahead.LaunchingCall(body=body, arguments=dry_tensors.described(arguments), named=())


def _variants(case: Case, length: int) -> Iterator[tuple[str, str]]:
    """Of one length: kernels and Triton's keys."""
    asked: list[tuple[str, str]] = []

    def note(kernel: Any, positional: Any, named: Any) -> None:
        asked.extend((kernel.fn.__name__, str(one.key)) for one in compiling.variants(kernel, positional, named))

    sized = dataclasses.replace(case, seqlen_q=length, seqlen_kv=length)
    problem = problems.build(sized, dtype=torch.bfloat16, device="cpu", target=Target.fake())
    with planned(problem.plan), torch.no_grad():
        for call in _calls(problem, _of_any_length(problem)):
            ahead.note_launches(call, note)
    yield from asked


def main() -> None:
    triton.runtime.driver.set_active(_Driver())
    properties = types.SimpleNamespace(multi_processor_count=132, L2_cache_size=50 * 2**20)
    found = {}
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=properties):
        for case in CASES:
            known: dict[str, set[str]] = {}
            late = []
            for i, length in enumerate(LENGTHS):
                for kernel, key in _variants(case, length):
                    if key not in known.setdefault(kernel, set()):
                        known[kernel].add(key)
                        late += [] if i < 2 else [f"{kernel} at {length}"]
            found[case.name] = {"variants": {name: len(keys) for name, keys in known.items()}, "late": late}
    json.dump([found], sys.stdout)


if __name__ == "__main__":
    main()
