"""`attn_compiler::round_fp8`: one tensor in FP8 or int8, its descales, and what the rounded numbers stand for.

    x8 = cast(clamp((x · factor - mean) · scale)), descale = 1 / scale, restored = x8 · descale + mean

An op, where the rest of a quantisation is nodes, for what Inductor does in more passes over memory: a block's scale together with its
rounding, and v with positions last. `restored` passes gradients on as if it were x · factor.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from attn_compiler.fp8_recipe import DTYPES, largest_of
from attn_compiler.lowerings.ops import late, register_helper

#: Bytes: the vectors that kernels load, along a head dim and, of v, along the sequence.
VECTOR = 16

#: Of 16 positions, 2t, 2t + 1, 8 + 2t and 9 + 2t lie side by side, for t of 0 ... 3: a thread of Hopper's tensor cores gets the weights of
#: those, and has to hand on four neighbours. So no weight has to change its thread (FlashAttention-3 permutes v in its kernel).
_GIVEN, _TAKEN = (2, 4, 2), (4, 2, 2)

SCHEMA = "(Tensor x, Tensor? mean, Tensor? scale, str how) -> (Tensor rounded, Tensor descale, Tensor restored)"
Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class How:
    """format: of fp8_recipe.DTYPES. block: positions that share a scale, where none is given; margin: as in CurrentScaling. turned:
    positions last, as `turned` says. restore: the dtype of what is restored, "" for none."""

    format: str
    block: int
    margin: int = 0
    factor: float = 1.0
    turned: bool = False
    restore: str = ""

    def to_text(self) -> str:
        """Canonical JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def from_text(text: str) -> How:
        """Inverse of `to_text`."""
        return How(**json.loads(text))

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
        """What a block's largest magnitude becomes."""
        return self.largest * 2.0**-self.margin


def turned(x: torch.Tensor) -> torch.Tensor:
    """(..., S, D) -> (..., D, S'), contiguous: positions last in the order that `in_order` undoes, S' a multiple of 16, 0 beyond S."""
    last = F.pad(x.transpose(-2, -1), (0, -x.shape[-2] % VECTOR))
    return torch.unflatten(last, -1, (-1, *_GIVEN)).transpose(-3, -2).flatten(-4).contiguous()


def in_order(x: torch.Tensor) -> torch.Tensor:
    """What `turned` gave, with its positions in their order: (..., D, S')"""
    return torch.unflatten(x, -1, (-1, *_TAKEN)).transpose(-3, -2).flatten(-4)


def empty_outputs(x: torch.Tensor, has_scale: bool, how: How) -> Outputs:
    """What `round_fp8` gives, unfilled. rounded: (B, H, S, D), or turned; descale: float32 (B, H, n); restored: as x lies. Nothing of
    what was not asked for."""
    batch, heads, length, head_dim = x.shape
    padded = length + -length % VECTOR
    shape = (batch, heads, head_dim, padded) if how.turned else (batch, heads, length, head_dim)
    rounded = torch.empty(shape, dtype=how.dtype, device=x.device)
    blocks = 0 if has_scale else (length + how.block - 1) // how.block
    descale = torch.empty((batch, heads, blocks), dtype=torch.float32, device=x.device)
    if not how.restore:
        return rounded, descale, torch.empty((0,), dtype=torch.float32, device=x.device)
    return rounded, descale, torch.empty_like(x, dtype=getattr(torch, how.restore))


def round_fp8(x: torch.Tensor, mean: torch.Tensor | None, scale: torch.Tensor | None, text: str) -> Outputs:
    """x: (B, H, S, D), the last stride 1. mean: float32 (B, H, 1, D), contiguous. scale: float32 (B|1, H|1, 1), or None: of each block
    its own. text: of a `How`. On a GPU one kernel (kernels/round_fp8.py), elsewhere plain PyTorch."""
    if x.device.type == "cuda":
        found: Outputs = _ON_GPU(x, mean, scale, text)
        return found
    return _in_pytorch(x, mean, scale, How.from_text(text))


_ON_GPU = late("fp8_rounding_launch", "round_fp8")


def _in_pytorch(x: torch.Tensor, mean: torch.Tensor | None, scale: torch.Tensor | None, how: How) -> Outputs:
    exact = x.float() * how.factor
    if mean is not None:
        exact = exact - mean
    finite = exact.isfinite()
    own = None
    if scale is None:
        own = _block_scales(torch.where(finite, exact.abs(), 0.0), how)
        spread = own.repeat_interleave(how.block, 2)[:, :, : x.shape[2], None]
    else:
        spread = scale[..., None]
    inside = (exact * spread).clamp(-how.largest, how.largest)
    if how.dtype == torch.int8:
        numbers = torch.where(finite, inside, 0.0).round().to(how.dtype)
    else:
        numbers = torch.where(finite, inside, torch.nan).to(how.dtype)
    _, descale, restored = empty_outputs(x, scale is not None, how)
    if own is not None:
        descale = own.reciprocal()
    if how.restore:
        back = numbers.float() / spread
        restored.copy_(back if mean is None else back + mean)
    return turned(numbers) if how.turned else numbers.contiguous(), descale, restored


def _block_scales(size: torch.Tensor, how: How) -> torch.Tensor:
    padded = F.pad(size, (0, 0, 0, -size.shape[2] % how.block))
    amax = padded.unflatten(2, (-1, how.block)).amax((3, 4))  # type: ignore[no-untyped-call]
    scale = how.fits / amax
    return torch.where((amax > 0) & scale.isfinite(), scale, 1.0)


def _fake(x: torch.Tensor, mean: torch.Tensor | None, scale: torch.Tensor | None, text: str) -> Outputs:
    return empty_outputs(x, scale is not None, How.from_text(text))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    ctx.factor, ctx.dtype = How.from_text(inputs[3]).factor, inputs[0].dtype
    ctx.mark_non_differentiable(output[0], output[1])


def _backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    gradient = gradients[2]
    exact = gradient if ctx.factor == 1.0 else gradient * ctx.factor
    return exact.to(ctx.dtype), None, None, None


register_helper(
    "round_fp8", SCHEMA, function=round_fp8, fake=_fake, differentiated=(_setup_context, _backward), exact_strides=True
)
