"""What one op does to the scores, or to the weights after the softmax, as data: score_steps.py reads it, score_chain.py adds it up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import fx

from attn_compiler.spec.scores import Pointwise


@dataclass(frozen=True, kw_only=True)
class Step:
    """One op on the scores: `source` carries them, `node` is the result. `uses`: further nodes that belong to the op."""

    node: fx.Node
    source: fx.Node
    uses: tuple[fx.Node, ...] = ()


@dataclass(frozen=True, kw_only=True)
class View(Step):
    """Elements are moved, not changed."""


@dataclass(frozen=True, kw_only=True)
class Cast(Step):
    """Another floating dtype."""


@dataclass(frozen=True, kw_only=True)
class Scale(Step):
    """Times a number known now."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class RuntimeScale(Step):
    """Times (or over) what is known at run time only: a number, or a tensor that broadcasts to the scores, as one number a head is."""

    by: fx.Node
    divide: bool


@dataclass(frozen=True, kw_only=True)
class Add(Step):
    """Plus weight × term. negates: the scores themselves are subtracted."""

    term: fx.Node
    weight: float = 1.0
    negates: bool = False


@dataclass(frozen=True, kw_only=True)
class Keep(Step):
    """Only where the condition holds (or, inverted, does not): the rest is masked out, with the score `fill`.

    by_numbers: the condition are numbers that the scores were multiplied by; it is one if all of them are 0 or 1.
    """

    condition: fx.Node
    inverted: bool
    fill: float
    by_numbers: bool = False


@dataclass(frozen=True, kw_only=True)
class Change(Step):
    """A change of each score by itself, by an op of that name. Of a softcap it is the middle: what follows is a scale."""

    name: str
    change: Pointwise


@dataclass(frozen=True, kw_only=True)
class SinkColumn(Step):
    """A column of logits joins the keys: as the last one, or as the `first`. sinks: the logits, or the number that all of them are."""

    sinks: fx.Node | float
    first: bool = False


@dataclass(frozen=True, kw_only=True)
class Clamp(Step):
    """No score below `low`, which masks, or above `high`. of_dtype: both are the ends of the scores' dtype, or none.

    Whether that changes a number, what the scores are multiplied with and what is added decide (fills.py).
    """

    low: float
    high: float = math.inf
    of_dtype: bool = False


@dataclass(frozen=True, kw_only=True)
class Offset(Step):
    """A number is added to every score: a softmax over them does not see it."""


@dataclass(frozen=True, kw_only=True)
class Shift(Step):
    """Minus the maximum along the last axis: a softmax over that axis does not see it."""
