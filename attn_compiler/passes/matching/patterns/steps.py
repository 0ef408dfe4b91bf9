"""Effect of one op on the scores, or on the weights, as data: score_steps.py reads it, score_chain.py adds the steps up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import fx

from attn_compiler.spec.scores import Pointwise


@dataclass(frozen=True, kw_only=True)
class Step:
    """One op on the scores: `source` carries them, `node` is the result. `uses`: further nodes of the op."""

    node: fx.Node
    source: fx.Node
    uses: tuple[fx.Node, ...] = ()


@dataclass(frozen=True, kw_only=True)
class View(Step):
    """A move of elements, without a change."""


@dataclass(frozen=True, kw_only=True)
class Cast(Step):
    """A cast to another floating dtype."""


@dataclass(frozen=True, kw_only=True)
class Scale(Step):
    """A product with a number known at compile time."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class RuntimeScale(Step):
    """A product (or quotient) with a run-time number, or with a tensor that broadcasts to the scores, such as one number a head."""

    by: fx.Node
    divide: bool


@dataclass(frozen=True, kw_only=True)
class Add(Step):
    """Addition of weight × term. negates: the scores are subtracted."""

    term: fx.Node
    weight: float = 1.0
    negates: bool = False


@dataclass(frozen=True, kw_only=True)
class Keep(Step):
    """A mask that keeps scores where the condition holds (or, inverted, does not). All other scores become `fill`.

    by_numbers: the condition holds numbers that multiplied the scores. It is a mask if all of them are 0 or 1.
    """

    condition: fx.Node
    inverted: bool
    fill: float
    by_numbers: bool = False


@dataclass(frozen=True, kw_only=True)
class Change(Step):
    """An elementwise change of the scores, by an op of that name. For a softcap it is the middle part; a scale follows."""

    name: str
    change: Pointwise


@dataclass(frozen=True, kw_only=True)
class SinkColumn(Step):
    """A column of logits that joins the keys, as the last one or as the `first`. sinks: the logits, or the number that all equal."""

    sinks: fx.Node | float
    first: bool = False


@dataclass(frozen=True, kw_only=True)
class Clamp(Step):
    """A clamp of the scores to `low`, which masks, and `high`. of_dtype: both are the ends of the scores' dtype, or infinite.

    Later scales and addends decide if the clamp changes a number (fills.py).
    """

    low: float
    high: float = math.inf
    of_dtype: bool = False


@dataclass(frozen=True, kw_only=True)
class Offset(Step):
    """A number added to every score. The softmax does not depend on it."""


@dataclass(frozen=True, kw_only=True)
class Shift(Step):
    """Subtraction of the maximum along the last axis, or of a number above it. A softmax over that axis does not depend on it.

    subtracted: that number. is_above: it may be above the maximum, so that the largest exponential is below 1.
    """

    subtracted: fx.Node
    is_above: bool = False
