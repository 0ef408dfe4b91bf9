"""The numeric rule for whole models: is what the backend computed as good as what eager computed?

float32: the difference from eager is at most 1e-4 of the tensor's largest value. Half precision: the error against a float32
copy of the model is at most twice eager's own. Both with a floor of rounding noise, because some gradients are zero but for
rounding (a key bias shifts every score of a row alike), and noise is no more equal than twice noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

RELATIVE_FP32 = 1e-4
NOISE_FP32 = 1e-6
FACTOR_HALF = 2.0
NOISE_HALF = 2.0**-8


@dataclass(frozen=True, kw_only=True, slots=True)
class Worst:
    """The tensor that is nearest to its limit, or furthest beyond. error, allowed: absolute; relative: error over the largest value."""

    name: str
    error: float
    relative: float
    allowed: float

    @property
    def ratio(self) -> float:
        return self.error / self.allowed if self.allowed else math.inf * bool(self.error)

    @property
    def agrees(self) -> bool:
        return self.error <= self.allowed


def worst(
    actual: Mapping[str, torch.Tensor],
    eager: Mapping[str, torch.Tensor],
    reference: Mapping[str, torch.Tensor] | None,
) -> Worst:
    """The worst tensor of `actual` by the rule; with a float32 `reference`, by the rule for half precision.

    A tensor that one of them lacks, that has another shape or dtype, or that is not finite, is infinitely wrong.
    """
    names = [*eager, *(actual.keys() - eager.keys())]
    largest = {kind: _largest(eager, kind) for kind in (True, False)}
    found = [_judge(name, actual, eager, reference, largest[_is_gradient(name)]) for name in names]
    return max(found, key=lambda one: one.ratio)


def _judge(
    name: str,
    actual: Mapping[str, torch.Tensor],
    eager: Mapping[str, torch.Tensor],
    reference: Mapping[str, torch.Tensor] | None,
    largest: float,
) -> Worst:
    if name not in actual or name not in eager:
        return _hopeless(f"{name} (only {'eager' if name in eager else 'compiled'} has it)")
    got, wanted = actual[name], eager[name]
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return _hopeless(f"{name} ({got.dtype}{list(got.shape)} instead of {wanted.dtype}{list(wanted.shape)})")
    if not wanted.isfinite().all():
        return _hopeless(f"{name} (eager itself is not finite)")
    if reference is None:
        top, error = _largest_value(wanted), _largest_value(got.double() - wanted.double())
        allowed = RELATIVE_FP32 * top + NOISE_FP32 * largest
    else:
        truth = reference[name]
        size = _root_mean_square if _is_gradient(name) else _largest_value
        top, error = size(truth), size(got.double() - truth.double())
        allowed = FACTOR_HALF * size(wanted.double() - truth.double()) + NOISE_HALF * top + NOISE_HALF / 4 * largest
    return Worst(name=name, error=error, relative=error / top if top else error, allowed=allowed)


def _largest_value(tensor: torch.Tensor) -> float:
    return _or_infinite(tensor.abs().max().item()) if tensor.numel() else 0.0


def _root_mean_square(tensor: torch.Tensor) -> float:
    return _or_infinite(tensor.double().square().mean().sqrt().item()) if tensor.numel() else 0.0


def _or_infinite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _hopeless(name: str) -> Worst:
    return Worst(name=name, error=math.inf, relative=math.inf, allowed=0.0)


def _is_gradient(name: str) -> bool:
    return name.startswith("grad ")


def _largest(tensors: Mapping[str, torch.Tensor], gradients: bool) -> float:
    return max((_largest_value(t) for name, t in tensors.items() if _is_gradient(name) == gradients), default=0.0)
