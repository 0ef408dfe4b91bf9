"""`attn_compiler::round_fp8`: tensors in FP8 or int8, their descales, and the restored tensors; `attn_compiler::largest_fp8`: their
largest finite magnitudes.

    x8 = cast(clamp((x · R - mean · R) · scale)), scale = fits / largest, descale = 1 / scale, restored = x8 · descale

R is a rotation, H / √D with Sylvester's H of D rows, ±1, which is symmetric; or none. The mean may be absent, too:
`attn_compiler::mean_fp8` finds it.

These are ops because Inductor would make more passes over memory and more launches of nodes: a block's scale together with its rounding,
magnitudes of the data, products with H, and v with positions last. Up to three tensors of one site at once. None has a gradient:
restoring.py attaches one to the attention's output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from attn_compiler.lowerings.fp8 import VECTOR
from attn_compiler.lowerings.shared.calls.leaf_calls import or_else
from attn_compiler.lowerings.shared.ops.leaf_ops import late
from attn_compiler.spec.codec import Codec, Coded
from attn_compiler.spec.fp8_recipe import DTYPES, largest_of
from attn_compiler.torch_private.op_library import register_helper

#: Of 16 positions, 2t, 2t + 1, 8 + 2t and 9 + 2t are neighbours, for t of 0 ... 3: a thread of Hopper's tensor cores gets these weights
#: from one product, and passes four neighbours to the next. So no weight changes its thread (FlashAttention-3 permutes v in its kernel).
_GIVEN, _TAKEN = (2, 4, 2), (4, 2, 2)

#: For each tensor rounded, descale, restored; then the newest magnitudes, and a shift where one is requested.
ROUND_SCHEMA = "(Tensor[] tensors, Tensor? mean, Tensor[] largest, str how, Tensor? seen=None) -> Tensor[]"
LARGEST_SCHEMA = "(Tensor[] tensors, Tensor? mean, str how, Tensor? seen=None) -> Tensor"
MEAN_SCHEMA = "(Tensor k, bool rotated, Tensor? seen=None) -> Tensor"
STAND_IN_SCHEMA = "(Tensor x) -> Tensor"
#: outputs for each tensor
EACH = 3

#: The unit of a magnitude: a tensor, a head of all batch rows, or a head of one batch row.
Per = Literal["tensor", "head", "row"]


@dataclass(frozen=True, kw_only=True, slots=True)
class How:
    """Rounding of one tensor.

    format: of fp8_recipe.DTYPES.
    margin: as in CurrentScaling.
    magnitude: the largest magnitude, if it is known beforehand; then every tensor's is.
    rotated: the tensor is multiplied by R, for a D that is a power of two.
    turned: the rounded tensor has positions last, as `turned` makes it.
    as_given: the rounded tensor's strides are in the order of the given one's. Else it is contiguous.
    restore: the dtype of the restored tensor, "" for none. It is rotated and without its mean, as the rounded tensor is.
    has_mean: the mean is subtracted.
    has_shift: products of q with the mean of its kv head are requested.
    of_keys: the positions are keys. A key that no query sees counts as 0.
    """

    format: str
    margin: int = 0
    magnitude: float | None = None
    rotated: bool = False
    turned: bool = False
    as_given: bool = False
    restore: str = ""
    has_mean: bool = False
    has_shift: bool = False
    of_keys: bool = False

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
        """The rounded value of the largest magnitude."""
        return self.largest * 2.0**-self.margin


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding(Coded):
    """Rounding of all tensors. block: positions that share a scale, where no magnitudes are given. per: the unit of requested magnitudes,
    if any."""

    each: tuple[How, ...]
    block: int
    per: Per | None = None


Rounding.codec = Codec((Rounding, How), brief=True)


def turned(x: torch.Tensor) -> torch.Tensor:
    """Return (..., S, D) as (..., D, S'), contiguous: positions last, in the order that `in_order` undoes; S' is a multiple of 16, 0
    beyond S."""
    last = F.pad(x.transpose(-2, -1), (0, -x.shape[-2] % VECTOR))
    return torch.unflatten(last, -1, (-1, *_GIVEN)).transpose(-3, -2).flatten(-4).contiguous()


def in_order(x: torch.Tensor) -> torch.Tensor:
    """Return the result of `turned` with its positions in sequence order: (..., D, S')."""
    return torch.unflatten(x, -1, (-1, *_TAKEN)).transpose(-3, -2).flatten(-4)


def signs(size: int, like: torch.Tensor) -> torch.Tensor:
    """Return H: (size, size) of ±1, by the parity of the bits that row and column share."""
    at = torch.arange(size, device=like.device)
    bits = at[:, None] & at
    for shift in (4, 2, 1):
        bits = bits ^ (bits >> shift)
    return (1 - 2 * (bits & 1)).to(like.dtype)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Return x · R, in float32."""
    wide, size = x.float(), x.shape[-1]
    return wide @ signs(size, wide) * math.sqrt(1 / size)


def unrotated(x: torch.Tensor, dtype: torch.dtype, *, near: float) -> torch.Tensor:
    """Return x · Rᵀ in float32, on tensor cores, which round it to `dtype`, of 16 bits: far below FP8's rounding. near: a power of two,
    which is exact, in place of 1 / √D until the product is float32: 1 / D keeps sums of the largest numbers in float16's range."""
    size = x.shape[-1]
    product = x.to(dtype) @ (signs(size, x.new_empty((), dtype=dtype)) * near)
    return product.float() * (math.sqrt(1 / size) / near)


def spread(descale: torch.Tensor, block: int, length: int) -> torch.Tensor:
    """Repeat each of (B, H, n) for `block` positions: (B, H, length)."""
    of_positions: torch.Tensor = descale[..., None].expand(*descale.shape, block).flatten(2)
    return of_positions[:, :, :length]


def count(x: torch.Tensor, per: Per) -> int:
    """Return the number of magnitudes of a tensor (B, H, S, D)."""
    return {"tensor": 1, "head": x.shape[1], "row": x.shape[0] * x.shape[1]}[per]


def empty_outputs(x: torch.Tensor, largest: torch.Tensor | None, how: How, block: int) -> list[torch.Tensor]:
    """Allocate the outputs of one tensor. rounded: (B, H, S, D), or turned; descale: float32 (B, H, n), as `largest`, or one; restored: in
    x's strides. Outputs that are not requested are empty."""
    batch, heads, length, head_dim = x.shape
    if how.as_given and not how.turned:
        rounded = torch.empty_like(x, dtype=how.dtype)
    else:
        shape = (batch, heads, head_dim, length + -length % VECTOR) if how.turned else x.shape
        rounded = torch.empty(shape, dtype=how.dtype, device=x.device)
    of_blocks = (batch, heads, (length + block - 1) // block) if how.magnitude is None else (1, 1, 1)
    descale = torch.empty(of_blocks if largest is None else largest.shape, dtype=torch.float32, device=x.device)
    if not how.restore:
        return [rounded, descale, torch.empty((0,), dtype=torch.float32, device=x.device)]
    return [rounded, descale, torch.empty_like(x, dtype=getattr(torch, how.restore))]


def empty_shift(tensors: Sequence[torch.Tensor], how: Rounding) -> list[torch.Tensor]:
    """Allocate float32 (B, H, S), contiguous, for the tensor with a shift; or return nothing."""
    asked = [x for x, each in zip(tensors, how.each, strict=True) if each.has_shift]
    return [torch.empty(x.shape[:3], dtype=torch.float32, device=x.device) for x in asked]


def round_fp8(
    tensors: Sequence[torch.Tensor],
    mean: torch.Tensor | None,
    largest: Sequence[torch.Tensor],
    text: str,
    seen: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Return rounded, descale and restored of each tensor, then the largest magnitudes of all as `largest_fp8`, or an empty tensor; then
    the shift of the rounded tensor, if requested: (B, H, S), float32.

    tensors: up to three, (B, H, S, D), the last stride 1. mean: of `mean_fp8`. largest: float32 (B|1, H|1, 1) for each tensor, contiguous,
    the magnitude that becomes `fits`; or none: each block has its own. text: of a `Rounding`. seen: bool (B|1, S), contiguous, the visible
    keys, or None for all: the others become 0, and count for nothing. On a GPU one kernel (kernels/round_fp8.py), elsewhere plain PyTorch.
    """

    def in_pytorch() -> list[torch.Tensor]:
        return _round_in_pytorch(tensors, mean, largest, Rounding.from_text(text), seen)

    if tensors[0].device.type != "cuda":
        return in_pytorch()
    return or_else("round_fp8", "round_fp8", lambda: _ROUND_ON_GPU(tensors, mean, largest, text, seen), in_pytorch)


def largest_fp8(
    tensors: Sequence[torch.Tensor], mean: torch.Tensor | None, text: str, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """Return float32 (n,): the largest finite magnitudes of (x - mean) · R, tensor after tensor. As `round_fp8` otherwise."""

    def in_pytorch() -> torch.Tensor:
        return _largest_in_pytorch(tensors, mean, Rounding.from_text(text), seen)

    if tensors[0].device.type != "cuda":
        return in_pytorch()
    found: torch.Tensor = or_else(
        "largest_fp8", "largest_fp8", lambda: _LARGEST_ON_GPU(tensors, mean, text, seen), in_pytorch
    )
    return found


def mean_fp8(k: torch.Tensor, rotated: bool, seen: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean of k over positions: float32 (B, H, n, D), contiguous. With `rotated`, the mean times R follows it.

    A position that is not finite, or not seen, counts as 0. A mean that overflows becomes 0: the shift restores scores for any subtracted
    vector.
    """

    def in_pytorch() -> torch.Tensor:
        return _mean_in_pytorch(k, rotated, seen)

    if k.device.type != "cuda":
        return in_pytorch()
    found: torch.Tensor = or_else("mean_fp8", "mean_fp8", lambda: _MEAN_ON_GPU(k, rotated, seen), in_pytorch)
    return found


def stand_in_fp8(x: torch.Tensor) -> torch.Tensor:
    """Return an unwritten tensor of x's shape and dtype: only gradients pass through, as those of x · R."""
    return x.new_empty((1, 1, 1, 1)).expand_as(x)


_ROUND_ON_GPU = late("fp8.rounding_launch", "round_fp8")
_LARGEST_ON_GPU = late("fp8.rounding_launch", "largest_fp8")
_MEAN_ON_GPU = late("fp8.rounding_launch", "mean_fp8")


def _round_in_pytorch(
    tensors: Sequence[torch.Tensor],
    mean: torch.Tensor | None,
    largest: Sequence[torch.Tensor],
    how: Rounding,
    seen: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    found, shift = [], []
    for i, (x, each) in enumerate(zip(tensors, how.each, strict=True)):
        exact = _exact(x, mean, each, seen)
        outputs = _one_in_pytorch(x, exact, mean, largest[i] if largest else None, each, how.block)
        found += outputs[:EACH]
        shift += outputs[EACH:]
    newest = _largest_in_pytorch(tensors, mean, how, seen) if how.per else torch.empty((0,), device=tensors[0].device)
    return [*found, newest, *shift]


def _exact(x: torch.Tensor, mean: torch.Tensor | None, how: How, seen: torch.Tensor | None) -> torch.Tensor:
    exact = rotated(x) if how.rotated else x.float()
    exact = exact if mean is None or not how.has_mean else exact - mean[:, :, -1:]
    return torch.where(_by_position(seen), exact, 0.0) if seen is not None and how.of_keys else exact


def _by_position(seen: torch.Tensor) -> torch.Tensor:
    """Return (B|1, S) as (B|1, 1, S, 1)."""
    return seen[:, None, :, None]


def _one_in_pytorch(
    x: torch.Tensor,
    exact: torch.Tensor,
    mean: torch.Tensor | None,
    given: torch.Tensor | None,
    how: How,
    block: int,
) -> list[torch.Tensor]:
    """Round one tensor. exact: its values before the rounding."""
    finite = exact.isfinite()
    amax = _amax_of_blocks(torch.where(finite, exact.abs(), 0.0), block) if given is None else given
    if how.magnitude is not None:
        amax = amax.new_full((1, 1, 1), how.magnitude)
    scale = how.fits / amax
    scale = torch.where((amax > 0) & scale.isfinite(), scale, 1.0)
    is_of_blocks = given is None and how.magnitude is None
    of_positions = (spread(scale, block, x.shape[2]) if is_of_blocks else scale)[..., None]
    inside = (exact * of_positions).clamp(-how.largest, how.largest)
    if how.dtype == torch.int8:
        numbers = torch.where(finite, inside, 0.0).round().to(how.dtype)
    else:
        numbers = torch.where(finite, inside, torch.nan).to(how.dtype)
    rounded, descale, restored = empty_outputs(x, given, how, block)
    descale.copy_(scale.reciprocal())
    back = numbers.float() * of_positions.reciprocal()
    if how.restore:
        restored.copy_(back)
    outputs = [turned(numbers) if how.turned else rounded.copy_(numbers), descale, restored]
    if mean is None or not how.has_shift:
        return outputs
    of_its_head = mean[:, :, -1:].repeat_interleave(x.shape[1] // mean.shape[1], 1)
    return [*outputs, (back * of_its_head).sum(-1)]


def _amax_of_blocks(size: torch.Tensor, block: int) -> torch.Tensor:
    padded = F.pad(size, (0, 0, 0, -size.shape[2] % block))
    return padded.unflatten(2, (-1, block)).amax((3, 4))  # type: ignore[no-untyped-call, no-any-return]


def _largest_in_pytorch(
    tensors: Sequence[torch.Tensor], mean: torch.Tensor | None, how: Rounding, seen: torch.Tensor | None = None
) -> torch.Tensor:
    dims = {"tensor": (0, 1, 2, 3), "head": (0, 2, 3), "row": (2, 3)}[how.per or "tensor"]
    exact = [_exact(x, mean, each, seen) for x, each in zip(tensors, how.each, strict=True)]
    return torch.cat([torch.where(x.isfinite(), x.abs(), 0.0).amax(dims).reshape(-1) for x in exact])


def _mean_in_pytorch(k: torch.Tensor, with_rotated: bool, seen: torch.Tensor | None = None) -> torch.Tensor:
    wide = k.float() if seen is None else torch.where(_by_position(seen), k.float(), 0.0)
    mean = torch.where(wide.isfinite(), wide, 0.0).mean(2, keepdim=True)
    mean = torch.where(mean.isfinite(), mean, 0.0)
    return torch.cat([mean, rotated(mean)], 2) if with_rotated else mean


def _fake_mean(k: torch.Tensor, rotated: bool, seen: torch.Tensor | None = None) -> torch.Tensor:
    return k.new_empty((*k.shape[:2], 1 + int(rotated), k.shape[3]), dtype=torch.float32)


def _fake_round(
    tensors: Sequence[torch.Tensor],
    mean: torch.Tensor | None,
    largest: Sequence[torch.Tensor],
    text: str,
    seen: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    how, found = Rounding.from_text(text), []
    for i, (x, each) in enumerate(zip(tensors, how.each, strict=True)):
        found += empty_outputs(x, largest[i] if largest else None, each, how.block)
    newest = _fake_largest(tensors, mean, text) if how.per else tensors[0].new_empty((0,), dtype=torch.float32)
    return [*found, newest, *empty_shift(tensors, how)]


def _fake_largest(
    tensors: Sequence[torch.Tensor], mean: torch.Tensor | None, text: str, seen: torch.Tensor | None = None
) -> torch.Tensor:
    per = Rounding.from_text(text).per or "tensor"
    return tensors[0].new_empty((sum(count(x, per) for x in tensors),), dtype=torch.float32)


def _stand_in_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    pass


def _stand_in_backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    near = 2.0 ** -math.ceil(math.log2(gradient.shape[-1]) / 2)
    return unrotated(gradient, gradient.dtype, near=near).to(gradient.dtype)


register_helper("round_fp8", ROUND_SCHEMA, function=round_fp8, fake=_fake_round, notes=True, exact_strides=True)
register_helper("largest_fp8", LARGEST_SCHEMA, function=largest_fp8, fake=_fake_largest, notes=True, exact_strides=True)
register_helper("mean_fp8", MEAN_SCHEMA, function=mean_fp8, fake=_fake_mean, notes=True, exact_strides=True)
register_helper(
    "stand_in_fp8",
    STAND_IN_SCHEMA,
    function=stand_in_fp8,
    differentiated=(_stand_in_context, _stand_in_backward),
)
