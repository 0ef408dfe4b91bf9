"""How far linear attention is from float64, beside the model's own function: outputs, states and every gradient.

    python -m benchmarks.linear_errors
    python -m benchmarks.linear_errors --device cuda --output benchmarks/results/linear_errors_h200.csv

Functions are transformers': the delta rule of Qwen3-Next, that of Kimi with a decay for each channel, the state space of Bamba with A from
-1 to -16. A row is one quantity of one call. eager, ours: ‖x - exact‖ / ‖exact‖, exact of the same function in float64. ratio: ours over
eager, where eager is at least one rounding of the quantity's dtype off. The rule is a ratio of at most 2 (spec/numerics.py).
"""

from __future__ import annotations

import importlib
import inspect
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import attn_compiler
from attn_compiler.spec.numerics import FACTOR
from attn_compiler.torch_private.substitution import Widened
from benchmarks import harness
from benchmarks.harness import Bench, Row, arg

DTYPES = ("float32", "bfloat16", "float16")
LENGTHS = (1, 63, 256, 1000, 8192)
#: bounds of what a token decays by, from weak to strong; of the state space they bound dt
STEPS = ((0.001, 0.1), (0.1, 1.0), (1.0, 10.0))
COLUMNS = ("recurrence", "dtype", "length", "steps", "lowering", "quantity", "eager", "ours", "ratio")
RECURRENCES = {
    "delta": ("qwen3_next", "torch_chunk_gated_delta_rule"),
    "channel": ("kimi_linear", "chunk_kimi_delta_attention"),
    "ssd": ("bamba", "mamba2_chunk_scan"),
}
#: output, last state
Results = tuple[Tensor, Tensor]
#: of the state space's call
_SSD_CHUNK = 256


@dataclass(frozen=True, kw_only=True)
class Problem:
    """call: from the operands, by name, to the output and the last state. operands: those that have gradients."""

    call: Callable[..., Results]
    operands: Mapping[str, Tensor]


def _function(recurrence: str) -> Callable[..., Results]:
    family, name = RECURRENCES[recurrence]
    found = inspect.unwrap(getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name))
    return found  # type: ignore[no-any-return]


def problem(recurrence: str, dtype: torch.dtype, length: int, steps: tuple[float, float], device: str) -> Problem:
    """Random operands: what a model holds in half precision is in `dtype`, decays, dt and A in float32."""
    torch.manual_seed(length)
    function, (low, high) = _function(recurrence), steps
    heads, dim_k, dim_v = 4, 16, 8

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, length, *shape).to(device, dtype)

    def between(*shape: int) -> Tensor:
        return (low + (high - low) * torch.rand(1, length, *shape)).to(device)

    if recurrence == "ssd":
        operands = {
            "x": normal(16, dim_v), "dt": between(16), "A": -torch.arange(1.0, 17.0, device=device),
            "B": normal(1, dim_k), "C": normal(1, dim_k), "D": torch.randn(16, device=device),
            "first": torch.randn(1, 16, dim_v, dim_k, device=device),
        }  # fmt: skip

        def scan(*, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, first: Tensor) -> Results:
            return function(x, dt, A, B, C, chunk_size=_SSD_CHUNK, D=D, initial_states=first, return_final_states=True)

        return Problem(call=scan, operands=operands)
    operands = {
        "q": normal(heads, dim_k), "k": normal(heads, dim_k), "v": normal(heads, dim_v),
        "g": -between(heads, dim_k) if recurrence == "channel" else -between(heads),
        "beta": torch.rand(1, length, heads).to(device, dtype),
        "first": torch.randn(1, heads, dim_k, dim_v, device=device),
    }  # fmt: skip
    more = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}

    def rule(*, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, first: Tensor) -> Results:
        return function(q, k, v, g, beta, initial_state=first, **more)

    return Problem(call=rule, operands=operands)


def quantities(call: Callable[..., Results], operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The results of a call, and the gradients of a fixed sum of them."""
    given = {name: x.detach().clone().requires_grad_() for name, x in operands.items()}
    results = dict(zip(("out", "state"), call(**given), strict=True))
    weights = torch.Generator().manual_seed(0)
    loss = [(x * torch.randn(x.shape, generator=weights).to(x)).double().sum() for x in results.values()]
    grads = torch.autograd.grad(loss, list(given.values()))
    return {name: x.detach() for name, x in results.items()} | {
        f"grad of {name}": grad for name, grad in zip(given, grads, strict=True)
    }


def errors(of: Problem, lowering: str) -> Iterator[dict[str, str]]:
    """The columns of each quantity under one lowering; `lowering` is empty where the call was left to the model."""
    with Widened():
        exact = quantities(of.call, {name: x.double() for name, x in of.operands.items()})
    eager = quantities(of.call, of.operands)
    attn_compiler.reset()
    torch.compiler.reset()
    options = {"inner": "aot_eager", "lowering": lowering}
    ours = quantities(torch.compile(of.call, backend="attn_compiler", options=options), of.operands)
    found = {site.decision.lowering for report in attn_compiler.reports() for site in report.linear}
    for name, wanted in exact.items():
        of_eager, of_ours = _off(eager[name], wanted), _off(ours[name], wanted)
        ratio = of_ours / max(of_eager, torch.finfo(eager[name].dtype).eps)
        row = {"quantity": name, "eager": f"{of_eager:.2e}", "ours": f"{of_ours:.2e}", "ratio": f"{ratio:.2f}"}
        yield row | {"lowering": ", ".join(sorted(found))}


def _off(x: Tensor, exact: Tensor) -> float:
    size = float(exact.norm())
    return float((x.double() - exact).norm()) / size if size else float(x.double().norm())


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call. steps: of STEPS."""

    recurrence: str
    dtype: str
    length: int
    steps: tuple[float, float]

    @property
    def names(self) -> dict[str, str]:
        shown = {"recurrence": self.recurrence, "dtype": self.dtype, "length": str(self.length)}
        return {**shown, "steps": "{}..{}".format(*self.steps)}


def measure(call: Call, given: Namespace) -> Iterator[Row]:
    """A row for each quantity."""
    of = problem(call.recurrence, getattr(torch, call.dtype), call.length, call.steps, given.device)
    yield from (call.names | row for row in errors(of, given.lowering))


def is_off(row: Row) -> bool:
    """Whether a quantity breaks the rule, or nothing of ours computed it."""
    return not (row["lowering"] and float(row["ratio"]) <= FACTOR)


def print_broken(rows: Sequence[Row]) -> None:
    broken = list(filter(is_off, rows))
    for row in broken:
        print(*(f"{name} {row[name]}" for name in COLUMNS))
    print(f"{len(broken)} of {len(rows)} quantities are off by more than {FACTOR:.0f} times the function's own error")


BENCH = Bench(
    doc=__doc__, results="linear_errors_cpu.csv", columns=COLUMNS, measure=measure, again=True, devices=("cpu", "cuda"),
    cases=lambda given: [
        Call(recurrence=recurrence, dtype=dtype, length=length, steps=steps)
        for recurrence in given.recurrences for dtype in given.dtypes for length in given.lengths for steps in STEPS
    ],
    short=("recurrence", "dtype", "length", "steps", "quantity", "ratio"), table=print_broken,
    failed=lambda rows: any(map(is_off, rows)),
    options=(
        arg("--recurrences", nargs="+", default=list(RECURRENCES), choices=RECURRENCES),
        arg("--dtypes", nargs="+", default=list(DTYPES)),
        arg("--lengths", nargs="+", type=int, default=list(LENGTHS)),
        arg("--lowering", default="linear_reference"),
    ),
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
