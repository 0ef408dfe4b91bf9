"""Near misses as data: a good attention with one thing changed, what has to be said of it, and the check that nothing else changed.

`near_miss` turns a function into a case; `check` compiles it and holds outputs, gradients and inputs against eager's. Two
lowerings are allowed: the CPU's kernel, and the reference, which takes nearly everything that a spec can say, so that what is
described wrongly also comes out wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import attn_compiler
from attn_compiler.reporting.report import Report

Function = Callable[..., Any]
Judge = Callable[[Report], None]

LOWERINGS = ("sdpa_cpu_flash", "reference")
BATCH, HEADS, LENGTH, HEAD_DIM = 2, 4, 6, 8
SHAPE = (BATCH, HEADS, LENGTH, HEAD_DIM)

TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-5, torch.bfloat16: 4e-2, torch.float16: 1e-2}


@dataclass(frozen=True, kw_only=True)
class Case:
    """inputs: made anew for each side. judge: fails if the report is not what it has to be. dynamic: as in torch.compile."""

    name: str
    function: Function
    inputs: Callable[[], Sequence[torch.Tensor]]
    judge: Judge
    dynamic: bool | None = None


class Cases(list[Case]):
    """Fills up through its decorator, or row by row."""

    def near_miss(
        self,
        judge: Judge,
        *,
        inputs: Callable[[], Sequence[torch.Tensor]] | None = None,
        dynamic: bool | None = None,
    ) -> Callable[[Function], Function]:
        """The decorated function, on q, k, v of SHAPE that require gradients or on `inputs`, is a case of its own name."""

        def add(function: Function) -> Function:
            self.add(function.__name__, judge, function, inputs=inputs or qkv, dynamic=dynamic)
            return function

        return add

    def add(self, name: str, judge: Judge, function: Function, **how: Any) -> None:
        """A case that is one expression. how: `inputs` and `dynamic`, as of `near_miss`."""
        self.append(Case(**{"name": name, "function": function, "inputs": qkv, "judge": judge, **how}))


# ---- inputs ---------------------------------------------------------------------------------------------------------


def normal(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random numbers that only depend on shape and seed."""
    generator = torch.Generator().manual_seed(hash((shape, seed)) % 2**31)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


def tensors(*shapes: tuple[int, ...], grad: bool = True, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """One leaf for each shape."""
    return [normal(*shape, grad=grad, dtype=dtype, seed=i + 1) for i, shape in enumerate(shapes)]


def qkv(*more: torch.Tensor, grad: bool = True, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k and v of SHAPE, and what else the function takes."""
    return [*tensors(SHAPE, SHAPE, SHAPE, grad=grad, dtype=dtype), *more]


def plain(*more: torch.Tensor) -> list[torch.Tensor]:
    """q, k and v without gradients."""
    return qkv(*more, grad=False)


def condition(*shape: int) -> torch.Tensor:
    """Random truth values, with True for the first key of each query."""
    kept = normal(*shape, seed=9) > 0
    kept[..., 0] = True
    return kept


# ---- what has to be said --------------------------------------------------------------------------------------------


def missed(rule: str, observed: str = "") -> Judge:
    """No site, and one miss for this reason (parts of its text)."""

    def judge(report: Report) -> None:
        assert not report.sites, f"taken for attention: {report.sites}"
        (miss,) = report.misses
        assert rule in miss.reason.rule, miss.reason
        assert observed in miss.reason.observed, miss.reason

    return judge


def refused(observed: str) -> Judge:
    """One site, left as it was, and one of the lowerings gives this as what it saw."""

    def judge(report: Report) -> None:
        assert not report.misses, report.misses
        (site,) = report.sites
        reasons = [reason for refusal in site.decision.refusals for reason in refusal.reasons]
        assert site.decision.lowering == "untouched", site.decision
        assert any(observed in reason.observed for reason in reasons), reasons

    return judge


def described(*words: str, sites: int = 1, lowering: str | None = None, because: str = "") -> Judge:
    """So many sites, all lowered (to `lowering`), and these words in what is said of their masks and scores.

    because: what a lowering that was asked before saw.
    """

    def judge(report: Report) -> None:
        assert not report.misses, report.misses
        assert report.num_sites == sites, report.sites
        for site in report.sites:
            assert site.decision.lowering in ((lowering,) if lowering else LOWERINGS), site.decision
            assert because in "; ".join(str(r) for refusal in site.decision.refusals for r in refusal.reasons), (
                site.decision
            )
        parts = [
            (x.spec.mask.words, x.spec.mask.dense and x.spec.mask.dense.words, x.spec.score.words) for x in report.sites
        ]
        said = "; ".join(str(word) for site in parts for word in site)
        assert all(word in said for word in words), said

    return judge


def with_lse(report: Report) -> None:
    """One site without sinks, lowered, whose logsumexp the model goes on to read."""
    described("", lowering="reference")(report)
    (site,) = report.sites
    assert site.spec.score.sinks is None, site.spec.score
    assert site.spec.lse != "unread"


def nothing(report: Report) -> None:
    """Neither a site nor a miss: there is no anchor."""
    assert not report.sites, report.sites
    assert not report.misses, report.misses


# ---- the check ------------------------------------------------------------------------------------------------------


def check(case: Case, *, lowerings: Sequence[str] = LOWERINGS) -> None:
    """Compile the case, compare it with eager, and let its judge see the report."""
    assert_same(case.function, case.inputs, lowerings=lowerings, dynamic=case.dynamic)
    (report,) = attn_compiler.reports()
    case.judge(report)


def assert_same(
    function: Function,
    inputs: Callable[[], Sequence[torch.Tensor]],
    *,
    lowerings: Sequence[str] = LOWERINGS,
    dynamic: bool | None = None,
) -> None:
    """Outputs (with their strides), gradients, and the inputs afterwards are eager's."""
    attn_compiler.reset()
    options = {"inner": "eager", "strict": True, "lowerings": lowerings}
    compiled = torch.compile(function, backend="attn_compiler", fullgraph=True, dynamic=dynamic, options=options)
    for expected, found in zip(run(function, inputs()), run(compiled, inputs()), strict=True):
        _assert_equal(expected, found)


@dataclass(frozen=True, kw_only=True)
class Result:
    name: str
    value: torch.Tensor | None
    is_output: bool = False


def run(function: Function, inputs: Sequence[torch.Tensor]) -> list[Result]:
    """Call the function and take the gradients of its outputs with respect to the inputs."""
    torch.manual_seed(0)
    # Clones of the leaves, so that the function may write to them in place.
    found = function(*(x.clone() if x.requires_grad else x for x in inputs))
    outputs = [found] if isinstance(found, torch.Tensor) else list(found)
    leaves = [x for x in inputs if x.requires_grad]
    differentiable = [o for o in outputs if o.requires_grad]
    results = [Result(name=f"output {i}", value=o.detach(), is_output=True) for i, o in enumerate(outputs)]
    results.append(Result(name="who requires a gradient", value=torch.tensor([o.requires_grad for o in outputs])))
    if leaves and differentiable:
        loss = sum((o.double() * _upstream(o)).sum() for o in differentiable)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)  # type: ignore[arg-type]
        results += [Result(name=f"gradient {i}", value=g) for i, g in enumerate(gradients)]
    results += [Result(name=f"input {i}", value=x.detach()) for i, x in enumerate(inputs)]
    return results


def _upstream(output: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, output.numel(), dtype=torch.float64).reshape(output.shape)


def _assert_equal(expected: Result, found: Result) -> None:
    a, b = expected.value, found.value
    if a is None or b is None:
        # Eager gives no gradient where a compiled graph may give zeros.
        rest = a if a is not None else b
        assert rest is None or not rest.any(), f"{expected.name}: only {'eager' if b is None else 'compiled'} has one"
        return
    assert (a.shape, a.dtype) == (b.shape, b.dtype), (
        f"{expected.name}: {b.dtype}{list(b.shape)}, not {a.dtype}{list(a.shape)}"
    )
    if expected.is_output and 1 not in a.shape and 0 not in a.shape:
        assert a.stride() == b.stride(), f"{expected.name}: strides {b.stride()} instead of {a.stride()}"
    size = max(1.0, float(a.abs().nan_to_num().max())) if a.is_floating_point() and a.numel() else 1.0
    tolerance = TOLERANCE.get(a.dtype, 0.0) * size
    torch.testing.assert_close(
        b, a, atol=tolerance, rtol=0, equal_nan=True, msg=lambda text: f"{expected.name}: {text}"
    )
