"""On one H200: the backward's passes of head dims above 256, alone, with one choice of tiles after another, and beside the other kernels.

    python -m benchmarks.bench_wide --budget-seconds 150

First each problem of tests/lowerings/hopper/test_backward_launch.py is held against float64, in processes of their own, which compile what
is timed as well. Then each pass is timed for each choice, and the whole backward beside the Triton kernels' and PyTorch's memory-efficient
one. TFLOP/s count allowed pairs, as in wide_h200.csv: dq and dk have 6 · pairs · D, dv 4, the whole backward 10. `off` is the norm of the
difference from the Triton kernels' gradient over its norm. Rows are written as they come; what the budget leaves out has none.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attn_compiler.lowerings.hopper import backward_launch, plan, wide_launch
from attn_compiler.lowerings.shared.launching import launch as launching, replaying
from attn_compiler.lowerings.shared.parts.kernel_plan import Band, Call
from attn_compiler.reasons.errors import AttnCompilerWarning
from attn_compiler.spec.target import Target
from benchmarks import harness
from tests.lowerings import kernel_problems
from tests.lowerings.hopper import problems, test_backward_launch
from tests.lowerings.kernel_cases import Case

RESULTS = Path(__file__).parent / "results" / "wide_backward_h200.csv"
COLUMNS = (
    "case",
    "kernel",
    "side",
    "us_p50",
    "tflops",
    "off",
    "failure",
    "device",
    "torch",
    "triton",
    "date",
    "commit",
)
_CAUSAL = Band(right=0)


def _case(name: str, batch: int, seqlen: int, heads: int, heads_kv: int, head_dim: int = 512, **further: Any) -> Case:
    return Case(
        name=name, batch=batch, seqlen_q=seqlen, seqlen_kv=seqlen, heads_q=heads, heads_kv=heads_kv, head_dim=head_dim,
        **({"band": _CAUSAL} | further),
    )  # fmt: skip


CASES = (
    _case("causal_8k_h8", 1, 8192, 8, 1),
    _case("causal_2k", 4, 2048, 32, 4),
    _case("padded_4k", 4, 4096, 16, 2, keys="left"),
    _case("full_4k", 1, 4096, 16, 2, band=None),
    _case("causal_d384_4k", 2, 4096, 16, 16, 384),
    _case("causal_d320_4k", 2, 4096, 16, 16, 320),
    _case("sinks_window_4k", 1, 4096, 64, 1, band=Band(left=127, right=0), sinks=True),
)
#: What differs from plan.wide_blocks_of, for dq and dk. The first one is timed for every case.
VARIANTS: dict[str, dict[str, int]] = {
    "hopper": {},
    "hopper, 232 registers": {"registers": 232},
    "hopper, 216 registers": {"registers": 216},
    "hopper, tiles of 64": {"tile": 64, "part_v": 64, "stages": 4, "stages_v": 3},
    "hopper, tiles of 32": {"tile": 32, "part_v": 128, "stages": 8, "stages_v": 3},
    "hopper, tiles of 64, 216 registers": {"tile": 64, "part_v": 64, "stages": 4, "stages_v": 3, "registers": 216},
}
_ALL_VARIANTS = ("causal_8k_h8", "causal_2k")
_REPEATS = 5


def _normal(draws: Any, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """As `kernel_problems._Draws.normal`, made where it is used."""
    return torch.randn(shape, device=draws.device, dtype=dtype or draws.dtype)


def build(case: Case) -> kernel_problems.Problem:
    """Without NaN beside what is used: those make all gradients be computed again."""
    with mock.patch.object(kernel_problems._Draws, "normal", _normal):
        problem = problems.build(case, dtype=torch.bfloat16, device="cuda", target=Target.current("cuda"))
    with torch.no_grad():
        for x in (problem.k, problem.v):
            x.nan_to_num_(0.5)
    return problem


@dataclasses.dataclass(frozen=True)
class Ran:
    """A backward that ran once: its kernels, to be started again, and its gradients."""

    kernels: dict[str, Callable[[], object]]
    grads: list[Tensor]

    def again(self) -> None:
        for kernel in self.kernels.values():
            kernel()


def run(problem: kernel_problems.Problem, variant: dict[str, int], read: tuple[Any, ...]) -> Ran:
    """Our backward with a choice of blocks for dq and dk. read: what it reads, as the leaf op takes it."""
    chosen = plan.wide_blocks_of
    kernels: dict[str, Callable[[], object]] = {}
    same = replaying.CallCache(device=problem.q.device)

    def blocks(spec: Any, grad: str) -> Any:
        found = chosen(spec, grad)
        return found if grad == "v" else dataclasses.replace(found, **variant)

    def start(kernel: Any, _: Any, tensors: Any, arguments: Any, part: str = "") -> None:
        made = functools.cache(arguments)
        once = functools.partial(launching.launch, kernel, same, tensors, made, part)
        once()
        kernels[f"{kernel.fn.__name__} {part}".strip()] = once

    with (
        kernel_problems.planned(problem.plan),
        torch.no_grad(),
        mock.patch.object(wide_launch, "wide_blocks_of", blocks),
    ):
        body = dataclasses.replace(backward_launch.gradients, start=start)
        shared = body.begin(*read)
        body.run(shared)
    return Ran(kernels=kernels, grads=[shared.tensors[f"Grad{name}"] for name in "QKV"])


def outputs(problem: kernel_problems.Problem) -> tuple[Tensor, Tensor]:
    with kernel_problems.planned(problem.plan), torch.no_grad():
        found: tuple[Tensor, Tensor] = torch.ops.attn_compiler.hopper(
            problem.q, problem.k, problem.v, problems.operands(problem), problem.text
        )
    return found


def read_by(problem: kernel_problems.Problem, operands: list[Tensor]) -> tuple[Any, ...]:
    """Arguments of a backward's leaf op."""
    out, lse = outputs(problem)
    grad_out, grad_lse = torch.randn_like(out), torch.zeros_like(lse)
    return (grad_out, grad_lse, problem.q, problem.k, problem.v, operands, out, lse, problem.text)


def took(call: Callable[[], object], repeats: int = _REPEATS) -> float:
    """Microseconds, the median of a few."""
    call()
    found = []
    for _ in range(repeats):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last) * 1000)
    return statistics.median(found)


def pairs(case: Case) -> float:
    """Allowed ones, of all heads."""
    n = case.seqlen_q
    used = [n - row * n // 2 if case.keys == "left" else n for row in range(case.batch)]
    if case.band is None:
        return float(sum(n * x for x in used) * case.heads_q)
    left = case.seqlen_q if case.band.left is None else case.band.left + 1
    return float(sum(x * (x + 1) // 2 - max(x - left, 0) * (max(x - left, 0) + 1) // 2 for x in used) * case.heads_q)


def off(mine: Tensor, theirs: Tensor) -> float:
    return float((mine.float() - theirs.float()).norm() / theirs.float().norm())


#: what a pass multiplies, over pairs · D
_FLOPS = {"q": 6.0, "k": 6.0, "v": 4.0}


def timed(case: Case, variants: dict[str, dict[str, int]]) -> Iterator[dict[str, str]]:
    """Rows of a case."""
    problem = build(case)
    read = read_by(problem, problems.grad_operands(problem))
    named = dict(problem.named)
    if problem.plan.tiles:
        named |= kernel_problems.lists(case, named, Call.from_text(problem.text).tiles, "cuda")
    triton_read = (*read[:5], [named[name] for name in problem.plan.operands], *read[6:])
    with kernel_problems.planned(problem.plan), torch.no_grad():
        by_triton = functools.partial(torch.ops.attn_compiler.triton_backward, *triton_read)
        right = by_triton()[:3]
        flops = pairs(case) * case.head_dim
        us = took(by_triton, 2)
    yield _row(case, "backward", "triton", us, 10.0 * flops)
    for name, variant in variants.items():
        try:
            ran = run(problem, variant, read)
        except (AssertionError, Warning, RuntimeError, TypeError, ValueError) as failure:
            yield _row(case, "backward", name, None, 0.0, failure=f"{type(failure).__name__}: {failure}"[:300])
            continue
        for label, kernel in ran.kernels.items():
            grad = label.rpartition(" ")[2]
            if "wide" in label:
                of = dict(zip("qkv", zip(ran.grads, right, strict=True), strict=True))[grad]
                yield _row(case, f"d{grad}", name, took(kernel), _FLOPS[grad] * flops, error=off(*of))
            elif name == next(iter(VARIANTS)):
                yield _row(case, label, name, took(kernel), 0.0)
        us = took(ran.again)
        yield _row(case, "backward", name, us, 10.0 * flops)


def efficient(case: Case) -> Iterator[dict[str, str]]:
    """PyTorch's memory-efficient kernel, k and v repeated before."""
    if case.keys or case.sinks or (case.band is not None and case.band.left is not None):
        return
    q, k, v = build(case).leaves[:3]
    k, v = (x.detach().repeat_interleave(case.heads_q // case.heads_kv, 1).requires_grad_() for x in (k, v))
    causal = case.band is not None
    upstream = torch.randn_like(q)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = scaled_dot_product_attention(q, k, v, is_causal=causal)
        backward = functools.partial(torch.autograd.grad, out, (q, k, v), upstream, retain_graph=True)
        yield _row(
            case, "backward", "efficient, k and v repeated", took(backward, 1), 10.0 * pairs(case) * case.head_dim
        )
        forward = functools.partial(scaled_dot_product_attention, q, k, v, is_causal=causal)
        yield _row(case, "forward", "efficient, k and v repeated", took(forward, 1), 4.0 * pairs(case) * case.head_dim)


def _row(
    case: Case, kernel: str, side: str, us: float | None, flops: float, *, error: float | None = None, failure: str = ""
) -> dict[str, str]:
    return {
        "case": case.name,
        "kernel": kernel,
        "side": side,
        "us_p50": "" if us is None else f"{us:.1f}",
        "tflops": f"{flops / us / 1e6:.1f}" if us and flops else "",
        "off": "" if error is None else f"{error:.5f}",
        "failure": failure,
    }


def check(name: str) -> str:
    """A problem of the tests, by its ops, against float64. Gives what is wrong."""
    warnings.filterwarnings("error", category=AttnCompilerWarning)
    case = next(case for case in test_backward_launch.WIDE if case.name == name)
    try:
        problem = problems.build(case, dtype=torch.bfloat16, device="cuda", target=Target.current("cuda"))
        for _ in range(2):
            kernel_problems.assert_within_rule(problems.by_ops(problem), problem)
    except (AssertionError, Warning, RuntimeError, TypeError, ValueError) as failure:
        return f"{type(failure).__name__}: {failure}"[:400]
    return ""


def warm(name: str, variant: str) -> str:
    """Compile what a case runs with a choice. Gives what went wrong."""
    case = next(case for case in CASES if case.name == name)
    try:
        problem = build(case)
        run(problem, VARIANTS[variant], read_by(problem, problems.grad_operands(problem)))
        torch.cuda.synchronize()
    except (AssertionError, Warning, RuntimeError, TypeError, ValueError) as failure:
        return f"{type(failure).__name__}: {failure}"[:400]
    return ""


def _of(case: Case) -> dict[str, dict[str, int]]:
    if case.name in _ALL_VARIANTS:
        return VARIANTS
    return dict(list(VARIANTS.items())[:1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-seconds", type=float, default=150.0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--commit", help="the commit to name in the rows, where this is no checkout")
    given = parser.parse_args()
    began = time.monotonic()
    where = harness.environment("cuda", given.commit) | {"triton": triton.__version__}
    where = {name: x for name, x in where.items() if name in COLUMNS}
    wrong = 0
    with ProcessPoolExecutor(given.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        asked: dict[Future[str], str] = {}
        for case in CASES:
            for variant in _of(case):
                asked[pool.submit(warm, case.name, variant)] = f"compiled: {case.name}, {variant}"
        for checked in test_backward_launch.WIDE:
            asked[pool.submit(check, checked.name)] = f"checked: {checked.name}"
        try:
            for future in as_completed(asked, timeout=given.budget_seconds * 0.6):
                said = future.result()
                wrong += bool(said)
                sys.stdout.write(f"{time.monotonic() - began:5.0f} s  {asked[future]}: {said or 'right'}\n")
                sys.stdout.flush()
        except TimeoutError:
            sys.stdout.write("the budget ends some checks\n")
            pool.shutdown(wait=False, cancel_futures=True)
    with given.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for case in CASES:
            for of_case in (timed(case, _of(case)), efficient(case)):
                if time.monotonic() - began > given.budget_seconds:
                    return 1
                for row in of_case:
                    writer.writerow(row | where)
                    file.flush()
                    sys.stdout.write("  ".join(x for x in row.values() if x) + "\n")
                    sys.stdout.flush()
            torch.cuda.empty_cache()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
