"""`kernel_problems` in FP8: the same cases with a recipe, rounded as quantise.py does; and what may be off by that.

Triton's interpreter multiplies FP8 tiles exactly (in float16 or float32), but cuts numbers off where GPUs round them to FP8: here
the conversion is PyTorch's, which rounds to nearest as hardware does. Nothing of the kernel is changed for that.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_compiler.lowerings.base import Operands
from attn_compiler.lowerings.fp8 import quantise, restoring
from attn_compiler.lowerings.shared.parts import tile_table
from attn_compiler.lowerings.shared.parts.kernel_plan import Call, Plan
from attn_compiler.spec.fp8_recipe import Fp8Recipe
from attn_compiler.spec.target import Target
from tests import numerics
from tests.lowerings import kernel_problems, plan_math
from tests.lowerings.kernel_cases import Case
from tests.lowerings.kernel_problems import Problem, planned

_DTYPES = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


@dataclass(frozen=True, kw_only=True)
class Fp8Problem:
    """For `hopper_fp8`, with the backward of `triton`. rounded, kept: what quantise.py makes, by name."""

    problem: Problem
    rounded: dict[str, Tensor]
    kept: dict[str, Tensor]

    @property
    def operands(self) -> list[Tensor]:
        return [*self.rounded.values(), *self.problem.operands]

    @property
    def as_rounded(self) -> tuple[Tensor, Tensor, Tensor]:
        """What q, k and v became, in their dtype."""
        read = restoring._read(list(self.kept.values()), self._text)
        return read.q, read.k, read.v

    @property
    def _text(self) -> str:
        spec = Call.from_text(self.problem.text).spec
        return restoring.kept_of(spec, self.problem.text).to_text()

    def attached(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """With the gradients of q, k and v."""
        problem = self.problem
        op = getattr(torch.ops.attn_compiler, restoring.op_of("triton"))
        operands = [out, lse, *self.kept.values(), *problem.operands]
        found: tuple[Tensor, Tensor] = op(problem.q, problem.k, problem.v, operands, self._text)
        return found


class Eager(kernel_problems.Eager):
    """buffers: what delayed scaling keeps, by name."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        buffer = self.buffers.setdefault(name, torch.zeros(shape))
        return buffer, buffer.clone()


def build(case: Case, recipe: Fp8Recipe, *, target: Target | None = None, **given: Any) -> Fp8Problem:
    """A case in half precision. target: as in `kernel_problems.build`."""
    return rounded_problem(kernel_problems.build(case, target=target, **given), recipe, target)


def rounded_problem(
    problem: Problem, recipe: Fp8Recipe, target: Target | None = None, *, seen: Tensor | None = None
) -> Fp8Problem:
    """The same problem, rounded. seen: as in quantise.emit, else what `seen_of` says."""
    call = Call.from_text(problem.text)
    spec = dataclasses.replace(call.spec, fp8=recipe)
    nodes: Any = {"q": problem.q, "k": problem.k, "v": problem.v}
    emitter: Any = Eager()
    made: Any = quantise.emit(emitter, spec, Operands(**nodes), seen=seen_of(problem) if seen is None else seen)
    rounded = dict(zip(quantise.names(spec), made.operands, strict=True))
    if target is not None:
        with planned(problem.plan):
            call = dataclasses.replace(call, tiles=tile_table.tiles(spec, target))
    text = dataclasses.replace(call, spec=spec).to_text()
    kept = dict(zip(restoring.kept_of(spec, text).names, made.kept, strict=True)) if made.kept else {}
    return Fp8Problem(problem=dataclasses.replace(problem, text=text), rounded=rounded, kept=kept)


def seen_of(problem: Problem) -> Tensor | None:
    """bool (B|1, Skv): what visible_keys.py says of a mask with such parts. None where that is nothing."""
    plan, case = problem.plan, problem.case
    band = None if plan.band is None else plan_math.allowed(Plan(band=plan.band), {}, case.seqlen_q, case.seqlen_kv)
    of_band = None if band is None else band[0].any(1).to(problem.q.device)
    if not plan.keys:
        return None if of_band is None or bool(of_band.all()) else of_band.contiguous()
    return problem.named["keys"] if of_band is None else (problem.named["keys"] & of_band).contiguous()


def results(given: Fp8Problem) -> list[Tensor]:
    """out, lse and all gradients, as `kernel_problems.results`."""
    out, lse = given.attached(*outputs(given))
    with planned(given.problem.plan):
        grad_out, grad_lse = upstream(out, lse)
        return [out, lse, *torch.autograd.grad([out, lse], given.problem.leaves, [grad_out, grad_lse])]


def outputs(given: Fp8Problem) -> tuple[Tensor, Tensor]:
    """out and lse of the kernel."""
    with planned(given.problem.plan):
        leaf, problem = torch.ops.attn_compiler.hopper_fp8, given.problem
        found: tuple[Tensor, Tensor] = leaf(problem.q, problem.k, problem.v, given.operands, problem.text)
    return found[0].detach(), found[1].detach()


def upstream(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Random gradients of both, none for a row without keys."""
    generator = torch.Generator().manual_seed(1)
    grad_out, grad_lse = (torch.randn(x.shape, generator=generator).to(x.device) for x in (out, lse))
    return grad_out.half().to(out.dtype), torch.where(lse == -torch.inf, 0.0, grad_lse).to(lse.dtype)


def assert_within_rule(got: Sequence[Tensor], given: Fp8Problem) -> None:
    """Hold `results` against the project's numeric rule (tests/numerics.py), from what was rounded on.

    exact: in float32. plain: the same with weights that are rounded once, against the largest of their row; in a backward those
    reach the gradients by sum(out · grad_out). To that comes what the model's dtype takes.
    """
    problem, (q, k, v) = given.problem, [x.detach() for x in given.as_rounded]
    leaves = [x.detach().float().requires_grad_() for x in (q, k, v, *problem.leaves[3:])]
    further = dict(zip(problem.plan.differentiable, leaves[3:], strict=True))
    named = {**problem.named, **further}
    out, lse = kernel_problems.attention(problem, *leaves[:3], named)
    plain_out = _with_rounded_weights(given, leaves, named)
    grad_out, grad_lse = upstream(out, lse)
    missing = ((plain_out - out) * grad_out).sum(-1).detach()
    exact = [out, lse, *torch.autograd.grad([out, lse], leaves, [grad_out, grad_lse], retain_graph=True)]
    plain = [plain_out, lse, *torch.autograd.grad([out, lse], leaves, [grad_out, grad_lse - missing])]
    usual = kernel_problems.expected(dataclasses.replace(problem, q=q, k=k, v=v), q.dtype)
    factor = numerics.FACTOR if problem.case.softcap is None else numerics.FACTOR_SOFTCAP
    for label, mine, right, rounded, half in zip(problem.labels, got, exact, plain, usual, strict=True):
        allowed = factor * (numerics.worst(rounded, right) + numerics.worst(half, right))
        allowed += numerics.floor(torch.where(right == -torch.inf, 0.0, right.detach()), q.dtype)
        found = numerics.worst(mine, right)
        assert found <= allowed, f"{label}: off by {found:.3g}, allowed {allowed:.3g}"


def _with_rounded_weights(given: Fp8Problem, leaves: Sequence[Tensor], named: dict[str, Tensor]) -> Tensor:
    case = given.problem.case
    eye = torch.eye(case.seqlen_kv, device=leaves[0].device).expand(case.batch, case.heads_kv, -1, -1)
    with torch.no_grad():
        v = leaves[2]
        if "keys" in named:
            v = v.masked_fill(~named["keys"][:, None, :, None], 0.0)
        weights, _ = kernel_problems.attention(given.problem, leaves[0], leaves[1], eye, named)
        largest = weights.amax(-1, keepdim=True).clamp(min=1e-30)
        rounded = (weights / largest * 256).to(torch.float8_e4m3fn).float() * largest / 256
        return rounded @ v.repeat_interleave(case.heads_q // case.heads_kv, 1)


@contextlib.contextmanager
def rounding_as_hardware() -> Iterator[None]:
    """Conversions to FP8 in Triton's interpreter are to nearest, and saturate. On a GPU they are the hardware's own."""
    if not triton.knobs.runtime.interpret:
        yield
        return
    interpreter = triton.runtime.interpreter
    own = interpreter._convert_float

    def convert(data: Any, source: Any, wanted: Any, rounding: Any) -> Any:
        if source in _DTYPES and wanted == tl.float32:
            # Its own makes numbers of NaN.
            return torch.from_numpy(np.array(data)).view(_DTYPES[source]).float().numpy()
        if source != tl.float32 or wanted not in _DTYPES:
            return own(data, source, wanted, rounding)
        values = torch.from_numpy(np.array(data, dtype=np.float32))
        limit = torch.finfo(_DTYPES[wanted]).max
        return values.clamp(-limit, limit).to(_DTYPES[wanted]).view(torch.uint8).numpy()

    with mock.patch.object(interpreter, "_convert_float", convert):
        yield
