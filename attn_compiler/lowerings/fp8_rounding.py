"""`attn_compiler::round_fp8`: tensors in FP8 or int8, their descales, and what the rounded numbers stand for; `attn_compiler::largest_fp8`:
their largest finite magnitudes.

    x8 = cast(clamp((x · factor - mean) · scale)), scale = fits / largest, descale = 1 / scale, restored = x8 · descale + mean

Ops, where Inductor would make more passes over memory and more launches of nodes: a block's scale together with its rounding, magnitudes of
the numbers themselves, and v with positions last. Up to three tensors of one site at once. `restored` passes gradients on as if it were
x · factor.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from attn_compiler.fp8_recipe import DTYPES, largest_of
from attn_compiler.lowerings.ops import late, register_helper

#: Bytes: the vectors that kernels load, along a head dim and, of v, along the sequence.
VECTOR = 16

#: Of 16 positions, 2t, 2t + 1, 8 + 2t and 9 + 2t lie side by side, for t of 0 ... 3: a thread of Hopper's tensor cores gets the weights of
#: those, and has to hand on four neighbours. So no weight has to change its thread (FlashAttention-3 permutes v in its kernel).
_GIVEN, _TAKEN = (2, 4, 2), (4, 2, 2)

#: `rounded`: for each tensor rounded, descale, restored; and last the newest magnitudes.
ROUND_SCHEMA = "(Tensor[] tensors, Tensor? mean, Tensor[] largest, str how) -> Tensor[]"
LARGEST_SCHEMA = "(Tensor[] tensors, Tensor? mean, str how) -> Tensor"
#: outputs for each tensor
EACH = 3

#: What shares a magnitude: a tensor, a head of all batch rows, or one of a batch row.
Per = Literal["tensor", "head", "row"]


@dataclass(frozen=True, kw_only=True, slots=True)
class How:
    """Of one tensor. format: of fp8_recipe.DTYPES. margin: as in CurrentScaling. turned: positions last, as `turned` says; as_given: the
    rounded one's strides are in the order of the given one's, else it is contiguous. restore: the dtype of what is restored, "" for none.
    has_mean: the mean is this one's."""

    format: str
    margin: int = 0
    factor: float = 1.0
    turned: bool = False
    as_given: bool = False
    restore: str = ""
    has_mean: bool = False

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, DTYPES[self.format])
        return found

    @property
    def largest(self) -> float:
        """The format's largest number."""
        return largest_of(self.format)

    @property
    def fits(self) -> float:
        """What the largest magnitude becomes."""
        return self.largest * 2.0**-self.margin


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """Of all tensors. block: positions that share a scale, where no magnitudes are given. per: of the magnitudes that are asked for; None:
    of none."""

    each: tuple[How, ...]
    block: int
    per: Per | None = None

    def to_text(self) -> str:
        """Canonical JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def from_text(text: str) -> Rounding:
        """Inverse of `to_text`."""
        found = json.loads(text)
        return Rounding(each=tuple(How(**how) for how in found.pop("each")), **found)


def turned(x: torch.Tensor) -> torch.Tensor:
    """(..., S, D) -> (..., D, S'), contiguous: positions last in the order that `in_order` undoes, S' a multiple of 16, 0 beyond S."""
    last = F.pad(x.transpose(-2, -1), (0, -x.shape[-2] % VECTOR))
    return torch.unflatten(last, -1, (-1, *_GIVEN)).transpose(-3, -2).flatten(-4).contiguous()


def in_order(x: torch.Tensor) -> torch.Tensor:
    """What `turned` gave, with its positions in their order: (..., D, S')"""
    return torch.unflatten(x, -1, (-1, *_TAKEN)).transpose(-3, -2).flatten(-4)


def count(x: torch.Tensor, per: Per) -> int:
    """How many magnitudes of a tensor (B, H, S, D)."""
    return {"tensor": 1, "head": x.shape[1], "row": x.shape[0] * x.shape[1]}[per]


def empty_outputs(x: torch.Tensor, largest: torch.Tensor | None, how: How, block: int) -> list[torch.Tensor]:
    """Of one tensor, unfilled. rounded: (B, H, S, D), or turned; descale: float32 (B, H, n), or as `largest`; restored: as x lies. Nothing
    of what was not asked for."""
    batch, heads, length, head_dim = x.shape
    if how.as_given and not how.turned:
        rounded = torch.empty_like(x, dtype=how.dtype)
    else:
        shape = (batch, heads, head_dim, length + -length % VECTOR) if how.turned else x.shape
        rounded = torch.empty(shape, dtype=how.dtype, device=x.device)
    descales = (batch, heads, (length + block - 1) // block) if largest is None else largest.shape
    descale = torch.empty(descales, dtype=torch.float32, device=x.device)
    if not how.restore:
        return [rounded, descale, torch.empty((0,), dtype=torch.float32, device=x.device)]
    return [rounded, descale, torch.empty_like(x, dtype=getattr(torch, how.restore))]


def round_fp8(
    tensors: Sequence[torch.Tensor], mean: torch.Tensor | None, largest: Sequence[torch.Tensor], text: str
) -> list[torch.Tensor]:
    """Of each tensor rounded, descale and restored, then the largest magnitudes of all as `largest_fp8` gives them, or nothing of those.

    tensors: up to three, (B, H, S, D), the last stride 1. mean: float32 (B, H, 1, D), contiguous. largest: float32 (B|1, H|1, 1) for each
    tensor, contiguous, the magnitude that becomes what fits; or none: of each block its own. text: of a `Rounding`. On a GPU one kernel
    (kernels/round_fp8.py), elsewhere plain PyTorch."""
    if tensors[0].device.type == "cuda":
        found: list[torch.Tensor] = _ROUND_ON_GPU(tensors, mean, largest, text)
        return found
    return _round_in_pytorch(tensors, mean, largest, Rounding.from_text(text))


def largest_fp8(tensors: Sequence[torch.Tensor], mean: torch.Tensor | None, text: str) -> torch.Tensor:
    """float32 (n,): the largest finite magnitudes of x · factor - mean, tensor after tensor. As `round_fp8` otherwise."""
    if tensors[0].device.type == "cuda":
        found: torch.Tensor = _LARGEST_ON_GPU(tensors, mean, text)
        return found
    return _largest_in_pytorch(tensors, mean, Rounding.from_text(text))


_ROUND_ON_GPU = late("fp8_rounding_launch", "round_fp8")
_LARGEST_ON_GPU = late("fp8_rounding_launch", "largest_fp8")


def _round_in_pytorch(
    tensors: Sequence[torch.Tensor], mean: torch.Tensor | None, largest: Sequence[torch.Tensor], how: Rounding
) -> list[torch.Tensor]:
    found = []
    for i, (x, each) in enumerate(zip(tensors, how.each, strict=True)):
        given = largest[i] if largest else None
        found += _one_in_pytorch(_exact(x, mean, each), x, mean if each.has_mean else None, given, each, how.block)
    newest = _largest_in_pytorch(tensors, mean, how) if how.per else torch.empty((0,), device=tensors[0].device)
    return [*found, newest]


def _exact(x: torch.Tensor, mean: torch.Tensor | None, how: How) -> torch.Tensor:
    exact = x.float() * how.factor
    return exact if mean is None or not how.has_mean else exact - mean


def _one_in_pytorch(
    exact: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor | None,
    given: torch.Tensor | None,
    how: How,
    block: int,
) -> list[torch.Tensor]:
    finite = exact.isfinite()
    amax = _amax_of_blocks(torch.where(finite, exact.abs(), 0.0), block) if given is None else given
    scale = how.fits / amax
    scale = torch.where((amax > 0) & scale.isfinite(), scale, 1.0)
    spread = scale[..., None]
    if given is None:
        spread = scale.repeat_interleave(block, 2)[:, :, : x.shape[2], None]
    inside = (exact * spread).clamp(-how.largest, how.largest)
    if how.dtype == torch.int8:
        numbers = torch.where(finite, inside, 0.0).round().to(how.dtype)
    else:
        numbers = torch.where(finite, inside, torch.nan).to(how.dtype)
    rounded, descale, restored = empty_outputs(x, given, how, block)
    descale.copy_(scale.reciprocal())
    if how.restore:
        back = numbers.float() * spread.reciprocal()
        restored.copy_(back if mean is None else back + mean)
    return [turned(numbers) if how.turned else rounded.copy_(numbers), descale, restored]


def _amax_of_blocks(size: torch.Tensor, block: int) -> torch.Tensor:
    padded = F.pad(size, (0, 0, 0, -size.shape[2] % block))
    return padded.unflatten(2, (-1, block)).amax((3, 4))  # type: ignore[no-untyped-call, no-any-return]


def _largest_in_pytorch(tensors: Sequence[torch.Tensor], mean: torch.Tensor | None, how: Rounding) -> torch.Tensor:
    dims = {"tensor": (0, 1, 2, 3), "head": (0, 2, 3), "row": (2, 3)}[how.per or "tensor"]
    exact = [_exact(x, mean, each) for x, each in zip(tensors, how.each, strict=True)]
    return torch.cat([torch.where(x.isfinite(), x.abs(), 0.0).amax(dims).reshape(-1) for x in exact])


def _fake_round(
    tensors: Sequence[torch.Tensor], mean: torch.Tensor | None, largest: Sequence[torch.Tensor], text: str
) -> list[torch.Tensor]:
    how, found = Rounding.from_text(text), []
    for i, (x, each) in enumerate(zip(tensors, how.each, strict=True)):
        found += empty_outputs(x, largest[i] if largest else None, each, how.block)
    return [*found, _fake_largest(tensors, mean, text) if how.per else tensors[0].new_empty((0,), dtype=torch.float32)]


def _fake_largest(tensors: Sequence[torch.Tensor], mean: torch.Tensor | None, text: str) -> torch.Tensor:
    per = Rounding.from_text(text).per or "tensor"
    return tensors[0].new_empty((sum(count(x, per) for x in tensors),), dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    tensors, _, largest, text = inputs
    ctx.factors = [how.factor for how in Rounding.from_text(text).each]
    ctx.dtypes, ctx.given = [x.dtype for x in tensors], len(largest)
    ctx.mark_non_differentiable(*[x for i, x in enumerate(output) if i % EACH != EACH - 1])


def _backward(ctx: Any, gradients: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    found = []
    for gradient, factor, dtype in zip(gradients[EACH - 1 :: EACH], ctx.factors, ctx.dtypes, strict=True):
        exact = gradient if factor == 1.0 else gradient * factor
        found.append(exact.to(dtype))
    return found, None, [None] * ctx.given, None


register_helper(
    "round_fp8",
    ROUND_SCHEMA,
    function=round_fp8,
    fake=_fake_round,
    differentiated=(_setup_context, _backward),
    exact_strides=True,
)
register_helper("largest_fp8", LARGEST_SCHEMA, function=largest_fp8, fake=_fake_largest, exact_strides=True)
