"""Pointwise changes of scores: one `Form` for each class of `scores.Pointwise`.

Plain lowerings apply a form from here. Our Triton kernels get its name and a number, and implement it in kernels/tile_parts.py (`changed`
and `through_change`). Libraries, and kernels of other languages, name the forms that they know in their `Takes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from attn_compiler.spec.scores import Pointwise, Softcap

X = TypeVar("X")

#: name of the form that changes nothing
UNCHANGED = "unchanged"


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """One pointwise change.

    name: of the form in tile_parts.py.
    apply: (call, scores, number) to the changed scores, as `applied`.
    slope: (changed scores, number) to the derivative there.
    """

    name: str
    apply: Callable[[Callable[..., Any], Any, float], Any]
    slope: Callable[[torch.Tensor, float], torch.Tensor]


def _softcap(call: Callable[..., Any], scores: Any, cap: float) -> Any:
    return call(torch.mul, call(torch.tanh, call(torch.div, scores, cap)), cap)


def _softcap_slope(changed: torch.Tensor, cap: float) -> torch.Tensor:
    return 1 - (changed / cap).square()


FORMS: dict[type[Pointwise], Form] = {Softcap: Form(name="softcap", apply=_softcap, slope=_softcap_slope)}

#: kinds that the plain lowerings and our Triton kernels apply
KINDS = tuple(FORMS)


def applied(call: Callable[..., X], scores: X, change: Pointwise | None) -> X:
    """Apply a change to scores. call: makes an op of its arguments, on tensors or as a node of a graph."""
    if change is None:
        return scores
    found: X = FORMS[type(change)].apply(call, scores, change.number)
    return found


def through(grad: torch.Tensor, changed: torch.Tensor, change: Pointwise | None) -> torch.Tensor:
    """Return the gradient of the scores before a change. grad: of the changed scores."""
    return grad if change is None else grad * FORMS[type(change)].slope(changed, change.number)


def name(change: Pointwise | None) -> str:
    """Return the name that kernels are compiled for."""
    return UNCHANGED if change is None else FORMS[type(change)].name


def number(change: Pointwise | None) -> float:
    """Return the number that kernels get beside the name."""
    return 1.0 if change is None else change.number
