"""What a call of our ops costs the host, in compiled code: microseconds of the thread that calls.

    python -m benchmarks.bench_host --run 6      # the kernels' ops, a minute on a GPU; writes benchmarks/results/host.csv
    python -m benchmarks.bench_host --dry-run    # every call twice, on a CPU where there is no GPU, to see that it runs

Tensors are small, so that the GPU is done before the host. A number is the median over bursts of calls, with nothing waited for within a
burst. "in compiled code": a place in it, which asks for addresses alone after its first call; "body": what is called where sizes are
symbolic; "op": through PyTorch's dispatcher.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "--dry-run" in sys.argv:
    # Read when kernels are defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import triton

from attn_compiler.lowerings.decode import (
    latent_launch,
    latent_schedule,
    launch as decode_launch,
    schedule as decode_schedule,
)
from attn_compiler.lowerings.hopper import backward_launch as hopper_backward, launch as hopper_launch
from attn_compiler.lowerings.shared.launching import ahead, dry_tensors
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from attn_compiler.lowerings.triton import launch as triton_launch
from attn_compiler.spec.target import Target
from benchmarks import harness
from benchmarks.harness import Bench, Row, arg
from tests.lowerings import kernel_problems
from tests.lowerings.decode import latent_problems, problems as decode_problems
from tests.lowerings.hopper import problems as hopper_problems
from tests.lowerings.kernel_cases import Case

COLUMNS = ("run", "what", "us", "device", "torch", "triton", "python", "date", "commit", "beside")
BURST, BURSTS = 40, 60


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A function, to be called within `planned`, which says what the kernels are to do. is_body: of an op, whose launches can be noted."""

    what: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    planned: Callable[[], AbstractContextManager[None]]
    is_body: bool = False

    @property
    def names(self) -> dict[str, str]:
        return {"what": self.what}


_SIZES: Any = {"batch": 1, "heads_q": 2, "heads_kv": 2, "seqlen_q": 128, "seqlen_kv": 128}
_ATTENTIONS = (
    Case(name="padding D 128", head_dim=128, keys="right", **_SIZES),
    Case(name="causal, padding, groups D 64", head_dim=64, keys="left", band=Band(right=0), **_SIZES | {"heads_q": 4}),
)
_DECODES = (
    decode_problems.Case(name="decode, plain D 128", head_dim=128, seqlen_kv=256),
    decode_problems.Case(name="decode, lengths, one split D 128", head_dim=128, bounds=((0, 150), (0, 37)), splits=1),
)
_LATENTS = (
    decode_problems.Case(name="decode over a latent, 4 splits", heads_q=16, seqlen_kv=256, splits=4),
    decode_problems.Case(name="decode over a latent, one split", heads_q=16, seqlen_kv=256, splits=1),
)


def attentions(device: str, target: Target) -> Iterator[Timed]:
    """The forward and the backward of each kernel family."""
    given: Any = {"dtype": torch.bfloat16, "device": device, "target": target}
    for case in _ATTENTIONS:
        of_triton = kernel_problems.build(case, **given)
        sites = triton_launch.ForwardSite(), triton_launch.BackwardSite()
        yield from _both("triton", of_triton, sites, (of_triton.operands, of_triton.operands), triton_launch)
        if device == "cpu":
            continue  # Nothing interprets Gluon.
        of_hopper = hopper_problems.build(case, **given)
        read = hopper_problems.operands(of_hopper), hopper_problems.grad_operands(of_hopper)
        places = hopper_launch.ForwardSite(), hopper_backward.BackwardSite()
        yield from _both("hopper", of_hopper, places, read, hopper_launch)


def _both(
    family: str, problem: kernel_problems.Problem, sites: tuple[Any, Any], read: tuple[Any, Any], module: Any
) -> Iterator[Timed]:
    q, k, v = (x.detach() for x in (problem.q, problem.k, problem.v))
    forward, backward = sites
    gradients = hopper_backward.gradients if module is hopper_launch else module.gradients
    operands, grad_operands = ([x.detach() for x in each] for each in read)
    out, lse = torch.empty_like(q), torch.zeros(q.shape[:3], device=q.device)
    upstream = torch.zeros_like(q), torch.zeros_like(lse)

    def timed(what: str, function: Callable[..., Any], *arguments: Any) -> Timed:
        return Timed(
            what=f"{family}, {problem.case.name}: {what}",
            function=function,
            arguments=(*arguments, problem.text),
            planned=lambda: kernel_problems.planned(problem.plan),
            is_body=what.endswith("body"),
        )

    given = (q, k, v, operands)
    given_back = (*upstream, q, k, v, grad_operands, out, lse)
    yield timed("forward, in compiled code", forward, *given)
    yield timed("forward, body", module.forward, *given)
    yield timed("backward, in compiled code", backward, *given_back)
    yield timed("backward, body", gradients, *given_back)


def decodes(device: str, target: Target) -> Iterator[Timed]:
    given: Any = {"dtype": torch.bfloat16, "device": device}
    for case in _DECODES:
        spec = decode_problems.build(case, **given).spec
        problem = decode_problems.build(case, **given, schedule=decode_schedule.table(spec, target))
        arguments = (problem.q, problem.k, problem.v, problem.operands, problem.text)
        yield from _decode(problem, decode_launch, arguments, lambda p=problem: decode_problems.planned(p.plan))
    for case in _LATENTS:
        sizes: Any = {**given, "rank": 512, "rope": 64}
        spec = latent_problems.of_latent(case, **sizes).spec
        schedule = latent_schedule.schedule(spec, target)
        problem = latent_problems.of_latent(case, **sizes, schedule=schedule)
        arguments = (problem.q, problem.v, problem.v, problem.operands, problem.text)
        yield from _decode(problem, latent_launch, arguments, lambda p=problem: latent_problems.planned(p))


def _decode(problem: decode_problems.Problem, module: Any, arguments: tuple[Any, ...], planned: Any) -> Iterator[Timed]:
    op = torch.ops.attn_compiler.decode_latent if module is latent_launch else torch.ops.attn_compiler.decode
    calls = {"in compiled code": module.ForwardSite(), "body": module.forward, "op": op}
    name = problem.case.name
    for what, function in calls.items():
        yield Timed(
            what=f"{name}: {what}", function=function, arguments=arguments, planned=planned, is_body=what == "body"
        )


def yardsticks(device: str) -> Iterator[Timed]:
    """What the machine's pace is known by."""
    empty = functools.partial(torch.empty, device=device)
    yield Timed(what="torch.empty", function=empty, arguments=(8,), planned=contextlib.nullcontext)
    x = torch.zeros(8, device=device)
    yield Timed(what="x.add_(1)", function=x.add_, arguments=(1,), planned=contextlib.nullcontext)


def compile_all(found: Sequence[Timed]) -> None:
    """The kernels of every body, beside each other."""
    begun = ahead.here()
    if begun is None:
        return
    for timed in found:
        if timed.is_body:
            call = ahead.LaunchingCall(body=timed.function, arguments=dry_tensors.described(timed.arguments), named=())
            with timed.planned():
                ahead.note_launches(call, begun.note)
    begun.built()


def microseconds(timed: Timed, *, burst: int, bursts: int, device: str) -> float:
    """Of one call."""
    found = []
    with timed.planned(), torch.inference_mode():
        for _ in range(3):
            timed.function(*timed.arguments)
        for _ in range(bursts):
            harness.synchronize(device)
            begin = time.perf_counter()
            for _ in range(burst):
                timed.function(*timed.arguments)
            found.append((time.perf_counter() - begin) / burst)
    harness.synchronize(device)
    return statistics.median(found) * 1e6


def everything(device: str, target: Target) -> list[Timed]:
    ours = [*decodes(device, target), *attentions(device, target)]
    return [*yardsticks(device), *ours, *yardsticks(device)]


def cases(given: Namespace) -> list[Timed]:
    """All calls, whose kernels are compiled."""
    found = everything(given.device, Target.current(given.device) if given.device != "cpu" else Target.fake())
    compile_all(found)
    return found


def measure(timed: Timed, given: Namespace) -> Iterator[Row]:
    burst, bursts = (2, 1) if given.dry_run else (BURST, BURSTS)
    us = microseconds(timed, burst=burst, bursts=bursts, device=given.device)
    yield {**timed.names, "us": f"{us:.2f}"}


def where(given: Namespace) -> dict[str, str]:
    known = harness.environment(given.device, given.commit)
    row = {name: known[name] for name in ("device", "torch", "date", "commit")}
    row |= {"run": str(given.run), "beside": given.beside, "triton": triton.__version__}
    return row | {"python": platform.python_version()}


BENCH = Bench(
    doc=__doc__,
    results="host.csv",
    columns=COLUMNS,
    cases=cases,
    measure=measure,
    options=(
        arg("--run", type=int, default=1, help="number of this run, in the rows"),
        arg("--beside", default="", help="what else ran on the machine"),
    ),
    devices=("cuda:0" if torch.cuda.is_available() else "cpu",),
    dry=True,
    together=True,
    where=where,
    short=("us", "what"),
    # What is compiled and held is part of what is timed.
    forget=lambda device: None,
)
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
