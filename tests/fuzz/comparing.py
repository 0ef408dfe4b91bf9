"""A program run by eager, exactly and compiled, and the three held against each other.

The rule is FlashAttention's: an output, a gradient or an input that was written may be off from the exact one (the same text in float64) by
twice what eager's is off by (three times with a tanh), and by the rounding of a number of its size. A result is as good as the worst of the
program's: eager's error is pooled over them, since of few elements it can be small by luck. Where that is not enough, the exact run is made
again with roundings: inputs that are off by one, and softmaxes whose backward is (`roundings.py`). No kernel can be asked to be better than
that (scores of ten thousand, say).

What is not compared is a discard, by name (`discards.py`). Nor is a gradient compared that eager itself makes of what was overwritten
(through `.data`) since it was saved: it is no gradient of anything, and differs from that of a run that saves copies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.fuzz import discards, roundings
from tests.fuzz.discards import Left
from tests.fuzz.program import Program

FACTOR, FACTOR_SOFTCAP = 2.0, 3.0
#: of a result, in units of the last place of its dtype
ULPS = {torch.float64: 2.0**22, torch.float32: 256.0, torch.float16: 4.0, torch.bfloat16: 4.0}
#: how many times as much where the exact result is zero
_CANCELLED = 4.0
#: casts to a dtype that a program names
_CASTS = re.compile(r"\.to\(torch\.(bfloat16|float16)\)")
#: What autograd says of a write into a view of our ops' output, where it runs them itself. Behind AOTAutograd, which all but the inner
#: compiler "eager" have, it does not.
_MULTIPLE_VIEWS = "This view is the output of a function that returns multiple views"
#: what eager is off by, of a result's size, where all of it was made in float32: no narrower number was in it, autocast or not
_WIDE = 2.0**-14
#: the largest score of a row of which every key is shut out by a finite number, halved by a later scale
KEYLESS = -32000.0


class Wrong(Exception):
    """A program that is a finding. kind: "wrong", "does not run", "endless", or "not known" for a discard that is of no known kind."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class OutOfTime(BaseException):
    """Raised by an alarm; no Exception, so that nobody takes it for an error of a pass."""


@dataclass(frozen=True, kw_only=True)
class Result:
    name: str
    value: torch.Tensor | None


@dataclass(kw_only=True)
class Outcome:
    """lowered: sites by lowering. untouched, missed: sites. proved: masks and scores. loosely: results that eager is far off.

    noisy: results that are off by no more than what roundings of the inputs do.
    """

    lowered: Counter[str] = field(default_factory=Counter)
    untouched: int = 0
    missed: int = 0
    proved: Counter[str] = field(default_factory=Counter)
    loosely: int = 0
    noisy: int = 0


def results(
    program: Program, function: Callable[..., Any], sizes: dict[str, int], *, exact: bool = False, noise: int = 0
) -> list[Result]:
    """Everything that one call and its backward give. noise: a seed, for inputs that are off by a rounding."""
    # A fused backward is not exact, in float64 either: where a number is added to all scores of a row, each key counts as the only one.
    with sdpa_kernel(SDPBackend.MATH) if exact else contextlib.nullcontext():
        return _results(program, function, sizes, exact=exact, noise=noise)


def _results(
    program: Program, function: Callable[..., Any], sizes: dict[str, int], *, exact: bool, noise: int
) -> list[Result]:
    torch.manual_seed(0)
    bases = program.bases(sizes, exact=exact)
    if noise:
        roundings.disturb(bases, torch.finfo(_narrowest(program, program.dtype)).eps, noise)
    # Clones of the leaves, so that the function may write to them in place.
    held = [x.clone() if x.requires_grad else x for x in bases]
    given = [_view(i.layout, x, sizes) for i, x in zip(program.inputs, held, strict=True)]
    found = list(function(*given))
    named = {i.name: x for i, x in zip(program.inputs, given, strict=True)}
    found = [_read(text, x, named) for text, x in zip(program.reads or ("{}",) * len(found), found, strict=True)]
    if any(x is None for x in found):
        # PyTorch's cuDNN attention does that for no batch at all.
        raise RuntimeError("an output is None")
    got = [
        Result(name=f"output {name}", value=x.detach().clone()) for name, x in zip(program.outputs, found, strict=True)
    ]
    wants = [x.requires_grad for x in found]
    named = {"out": found, "F": torch.nn.functional, "torch": torch, **named}
    for line in program.after:
        exec(line, named)
    leaves = [x for x in bases if x.requires_grad]
    differentiable = [o for o in found if o.requires_grad and o.is_floating_point()]
    got.append(Result(name="who wants a gradient", value=torch.tensor(wants)))
    if leaves and differentiable:
        loss = sum((o.double() * _upstream(o)).sum() for o in differentiable)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)  # type: ignore[arg-type]
        names = [i.name for i, x in zip(program.inputs, bases, strict=True) if x.requires_grad]
        got += [Result(name=f"gradient of {name}", value=g) for name, g in zip(names, gradients, strict=True)]
    got += [
        Result(name=f"input {i.name} afterwards", value=x.detach()) for i, x in zip(program.inputs, held, strict=True)
    ]
    return got


def _view(layout: str, base: torch.Tensor, sizes: dict[str, int]) -> torch.Tensor:
    if layout == "{}":
        return base
    text = re.sub(r"\$(\w+)", lambda found: str(sizes[found[1]]), layout).replace("{}", "x")
    view: torch.Tensor = eval(text, {"x": base})
    return view


def _read(text: str, output: Any, named: Mapping[str, torch.Tensor]) -> Any:
    return output if text == "{}" else eval(text.format("out"), {"torch": torch, "out": output, **named})


def _upstream(output: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, output.numel(), dtype=torch.float64, device=output.device).reshape(output.shape).cos()


# ---- eager -----------------------------------------------------------------------------------------------------------------


def expected(program: Program, sizes: dict[str, int]) -> tuple[list[Result], list[Result]]:
    """(eager's, exactly; None for what eager made of overwritten numbers). Raises Left where eager says nothing."""
    keyless: list[bool] = []

    def probe(largest: torch.Tensor, smallest: torch.Tensor | None = None) -> None:
        is_filled = largest.detach() <= KEYLESS
        if smallest is not None:
            # Every key was given one number, and that was lifted again.
            is_filled |= (largest == smallest) & (largest.detach().abs() >= -KEYLESS)
        keyless.append(bool((is_filled & largest.isfinite()).any()))

    try:
        eager = results(program, program.function(probe=probe), sizes)
        _wait(program)
        if any(keyless):
            raise Left(discards.KEYLESS)
        exact = results(program, program.function(exact=True), sizes, exact=True)
        exact = _true_gradients(program, sizes, exact)
        _wait(program)
    except Left:
        raise
    except Exception as error:
        left = discards.of_eager(error)
        if left is None:
            raise Wrong("not known", f"eager raises {_said(error)}") from error
        raise left from error
    if not all(_is_finite(r) for r in (*eager, *exact)):
        raise Left(discards.NOT_FINITE)
    pairs = zip(eager, exact, strict=True)
    if any(a.value is not None and b.value is not None and a.value.shape != b.value.shape for a, b in pairs):
        raise Left(discards.OTHER_SHAPES)
    return eager, exact


def _wait(program: Program) -> None:
    """For what was launched on a GPU: an error of it would surface in what comes next."""
    if program.device != "cpu":
        torch.cuda.synchronize()


def _true_gradients(program: Program, sizes: dict[str, int], exact: list[Result]) -> list[Result]:
    """The exact results, without gradients where any that eager saved for them was overwritten: another kernel saves something else."""
    if not any(word in line for line in (*program.lines, *program.after) for word in ("data", "detach")):
        return exact
    overwritten: list[bool] = []

    def kept(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x.clone()

    def unpacked(saved: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        now, then = saved
        overwritten.append(not torch.equal(now, then))
        return now

    with torch.autograd.graph.saved_tensors_hooks(kept, unpacked):
        # Eager's kernel for float64 may save a copy where the one for halves saves the tensor itself.
        results(program, program.function(exact=True), sizes, exact=True)
        results(program, program.function(), sizes)
    if not any(overwritten):
        return exact
    return [Result(name=r.name, value=None) if r.name.startswith("gradient") else r for r in exact]


def _is_finite(result: Result) -> bool:
    return result.value is None or not result.value.is_floating_point() or bool(result.value.isfinite().all())


# ---- compiled --------------------------------------------------------------------------------------------------------------


def check(program: Program) -> Outcome:
    """Hold the compiled program against eager. Raises Left, or Wrong."""
    wanted = [(sizes, *expected(program, sizes)) for sizes in program.calls[:1]]
    for sizes in program.calls[1:]:
        try:
            wanted.append((sizes, *expected(program, sizes)))
        except Left:
            continue
    outcome = Outcome()
    # Programs are too small to gain from it, and padding is left out of them all the same.
    with mock.patch("attn_compiler.passes.unpad.unpadding.PackedWork.is_saved", return_value=True):
        problem = _compiled(program, wanted, outcome, ours=True)
    if problem is None:
        return outcome
    if program.inner == "eager" and _MULTIPLE_VIEWS in str(problem):
        return check(dataclasses.replace(program, inner="aot_eager"))
    rolled = discards.of_roll(str(problem), source=program.source, inner=program.inner)
    if rolled is not None:
        raise rolled
    # With the same inner compiler and without us.
    other = _compiled(program, wanted, Outcome(), ours=False)
    if other is None and program.inner == "eager":
        # What is concluded goes by how AOTAutograd sees the program, which is not always how eager runs it (the strides of a roll).
        other = _compiled(dataclasses.replace(program, inner="aot_eager"), wanted, Outcome(), ours=False)
    # What verify finds wrong may be torch.compile's own.
    is_wrong = problem.kind == "wrong" or "VerificationMismatch" in str(problem)
    if other is None or (other.kind == "wrong" and not is_wrong):
        raise problem
    left = Left(discards.WRONG_TOO) if other.kind == "wrong" else discards.of_torch(str(other))
    if left is None:
        raise Wrong("not known", f"torch.compile without us: {other}")
    raise left


def _compiled(program: Program, wanted: Sequence[Any], outcome: Outcome, *, ours: bool) -> Wrong | None:
    import attn_compiler

    torch._dynamo.reset()
    attn_compiler.reset()
    dynamic = True if program.dynamic else None
    if ours:
        options: dict[str, Any] = {"inner": program.inner, "strict": True, "verify": program.verify}
        if program.lowerings is not None:
            options["lowerings"] = program.lowerings
        if program.unpad:
            options["unpad"] = True
        if program.share:
            options["share_prefix"] = True
        compiled = torch.compile(
            program.function(), backend="attn_compiler", fullgraph=program.is_whole, dynamic=dynamic, options=options
        )
    else:
        compiled = torch.compile(program.function(), backend=program.inner, fullgraph=program.is_whole, dynamic=dynamic)
    try:
        for sizes, eager, exact in wanted:
            found = results(program, compiled, sizes)
            _wait(program)
            _hold(program, eager, exact, found, outcome, functools.partial(_noise, program, sizes, exact))
    except Wrong as wrong:
        return wrong
    except Exception as error:  # noqa: BLE001 (whatever keeps a program from running is a finding)
        return Wrong("does not run", _said(error))
    if ours:
        _count(outcome)
    return None


def _said(error: Exception) -> str:
    lines = " | ".join(line for line in str(error).splitlines() if line.strip())
    return f"{type(error).__name__}: {lines[:1500]}"


def _count(outcome: Outcome) -> None:
    import attn_compiler

    for report in attn_compiler.reports():
        outcome.missed += report.num_misses
        if report.unpad is not None:
            outcome.proved["padding stays" if report.unpad.kept else "padding is left out"] += 1
        for call in report.linear:
            if call.decision.lowering == "untouched":
                outcome.untouched += 1
            else:
                outcome.lowered[call.decision.lowering] += 1
        for site in report.sites:
            times = len(site.modules)
            if site.decision.lowering == "untouched":
                outcome.untouched += times
            else:
                outcome.lowered[site.decision.lowering] += times
            outcome.proved.update(type(kind).__name__ for kind in (*site.spec.mask.read, *site.spec.score.proved))
            if site.spec.mask.reason is not None:
                outcome.proved["dense: not proved"] += 1


def _noise(program: Program, sizes: dict[str, int], exact: list[Result]) -> list[float]:
    """How far each exact result moves when the inputs and the softmaxes' gradients move by a rounding."""
    worst_of: list[float] = [0.0] * len(exact)
    for seed in range(1, 5):
        with roundings.rounded(torch.finfo(_narrowest(program, program.dtype)).eps, seed):
            moved = results(program, program.function(exact=True), sizes, exact=True, noise=seed)
        for i, (a, b) in enumerate(zip(moved, exact, strict=True)):
            if a.value is not None and b.value is not None and a.value.is_floating_point() and a.value.numel():
                off = worst(a.value, b.value)
                worst_of[i] = max(worst_of[i], off if math.isfinite(off) else 0.0)
    return worst_of


def _hold(
    program: Program,
    eager: list[Result],
    exact: list[Result],
    found: list[Result],
    outcome: Outcome,
    noise: Callable[[], list[float]],
) -> None:
    """Raise Wrong where a result is off by more than it may be. noise: what `_noise` gives, which is seldom asked for."""
    factor = FACTOR_SOFTCAP if "tanh" in program.source else FACTOR
    pooled = max((_relative(e, x) for e, x in zip(eager, exact, strict=True)), default=0.0)
    narrowest = functools.partial(_narrowest, program) if pooled > _WIDE else lambda dtype: dtype
    for at, (mine, right, usual) in enumerate(zip(found, exact, eager, strict=True)):
        a, b = mine.value, usual.value
        if right.value is None and b is not None:
            continue
        if a is None or b is None:
            # Eager gives no gradient where a compiled graph may give zeros.
            rest = a if a is not None else b
            if rest is not None and bool(rest.any()):
                raise Wrong("wrong", f"{mine.name}: only {'eager' if a is None else 'compiled'} has one")
            continue
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise Wrong("wrong", f"{mine.name}: {a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}")
        if not b.is_floating_point():
            if not torch.equal(a, b):
                raise Wrong("wrong", f"{mine.name}: {int((a != b).sum())} of {a.numel()} elements differ")
            continue
        if not a.numel():
            continue
        size = max(float(right.value.abs().max()), 1.0)
        own = max(worst(b, right.value), pooled * size / 2)
        # Of what cancels out to nothing only roundings are left, of numbers that are larger than the result.
        ulps = ULPS[narrowest(b.dtype)] * (1.0 if right.value.any() else _CANCELLED)
        allowed = factor * own + ulps * torch.finfo(narrowest(b.dtype)).eps * size
        if mine.name.startswith("gradient"):
            allowed += _next_number(program, b.dtype) * size
        off = worst(a, right.value)
        outcome.loosely += allowed > 0.1 * size
        # What is as far off as eager, and the same way, is as good as it.
        if off > allowed and worst(a, b) > allowed - factor * own:
            # The noise is of four throws, and of few of the roundings: scores, weights and products round as well.
            if off <= allowed + 2 * factor * noise()[at]:
                outcome.noisy += 1
                continue
            raise Wrong(
                "wrong", f"{mine.name}: off by {off:.3g}, eager by {worst(b, right.value):.3g}, allowed {allowed:.3g}"
            )


def _next_number(program: Program, dtype: torch.dtype) -> float:
    """By what part a gradient is off that went through a cast written in the program and became the next number: it may have been between
    both, and a rounding in float32 decides."""
    casts = [torch.finfo(getattr(torch, name)).eps for name in _CASTS.findall(program.source)]
    return max((eps for eps in casts if eps > torch.finfo(dtype).eps), default=0.0)


def _narrowest(program: Program, dtype: torch.dtype) -> torch.dtype:
    """Under autocast a result of float32 was made of narrower numbers."""
    if "autocast" not in program.source or dtype == torch.float64:
        return dtype
    return torch.bfloat16


def _relative(usual: Result, right: Result) -> float:
    if usual.value is None or right.value is None or not usual.value.is_floating_point() or not usual.value.numel():
        return 0.0
    return worst(usual.value, right.value) / max(float(right.value.abs().max()), 1.0)


def worst(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference; infinite where one of them is not finite and the other is something else."""
    # Imports our package, which a planted fault has to come before.
    from tests import numerics

    return numerics.worst(found, exact)
