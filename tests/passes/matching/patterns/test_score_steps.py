"""One op at a time: how a node of the mirror is read as a step on the scores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.matching.patterns import score_steps
from attn_compiler.passes.matching.patterns.steps import (
    Add,
    Cast,
    Change,
    Clamp,
    Keep,
    RuntimeScale,
    Scale,
    Shift,
    SinkColumn,
    Step,
    View,
)
from tests.passes.compiling import compiled, mirror_of

LOWEST = torch.finfo(torch.float32).min


def read(function: Callable[..., Tensor], *others: Tensor) -> tuple[list[Step], Mirror, fx.Node]:
    """Steps of the last op of `function`, whose first argument stands for the scores (2, 4, 5, 6)."""
    mirror = mirror_of(lambda scores, *rest: function(scores.sin(), *rest).cos(), torch.randn(2, 4, 5, 6), *others)
    (cos,) = (n for n in mirror.graph.nodes if n.target is torch.ops.aten.cos.default)
    (sin,) = (n for n in mirror.graph.nodes if n.target is torch.ops.aten.sin.default)
    return score_steps.read(mirror, cos.args[0]), mirror, sin


def _one(function: Callable[..., Tensor], *others: Tensor) -> Step:
    """The only step; its source is the scores."""
    steps, _, scores = read(function, *others)
    (step,) = steps
    assert step.source is scores
    return step


MASK = torch.zeros(2, 1, 5, 6)
ALLOWED = torch.ones(2, 1, 5, 6, dtype=torch.bool)


@pytest.mark.parametrize(
    ("function", "factor"),
    [
        (lambda s: s * 0.5, 0.5),
        (lambda s: 0.5 * s, 0.5),
        (lambda s: s / 4, 0.25),
        (lambda s: s.mul_(2), 2.0),
        (lambda s: s.div_(2), 0.5),
        (lambda s: s * torch.tensor(0.5), 0.5),
        (lambda s: torch.full([], 0.5) * s, 0.5),
        (lambda s: s / torch.tensor(16.0).sqrt(), 0.25),
    ],
)
def test_scale(function: Callable[..., Tensor], factor: float) -> None:
    step = _one(function)
    assert isinstance(step, Scale)
    assert step.factor == pytest.approx(factor)


@pytest.mark.parametrize(
    ("function", "divide"), [(lambda s, t: s * t, False), (lambda s, t: t * s, False), (lambda s, t: s / t, True)]
)
def test_runtime_scale(function: Callable[..., Tensor], divide: bool) -> None:
    step = _one(function, torch.tensor(2.0))
    assert isinstance(step, RuntimeScale)
    assert step.divide == divide


@pytest.mark.parametrize(
    "function",
    [lambda s: 2 / s, lambda s: s * 0, lambda s: torch.div(s, 2, rounding_mode="floor")],
    ids=["reciprocal", "zero", "floor"],
)
def test_what_is_no_scale(function: Callable[..., Tensor]) -> None:
    steps, _, scores = read(function)
    assert not [step for step in steps if step.source is scores]


@pytest.mark.parametrize(
    ("function", "weight"),
    [
        (lambda s, m: s + m, 1.0),
        (lambda s, m: m + s, 1.0),
        (lambda s, m: s.add_(m), 1.0),
        (lambda s, m: torch.add(s, m, alpha=3), 3.0),
        (lambda s, m: s - m, -1.0),
    ],
)
def test_add(function: Callable[..., Tensor], weight: float) -> None:
    step = _one(function, MASK)
    assert isinstance(step, Add)
    assert step.weight == weight
    assert step.term.op == "placeholder"


def test_either_operand_of_a_sum_of_equal_shapes_may_be_the_scores() -> None:
    steps, _, scores = read(lambda s, m: s + m, torch.zeros(2, 4, 5, 6))
    assert [type(step) for step in steps] == [Add, Add]
    assert {step.source for step in steps} >= {scores}


@pytest.mark.parametrize(
    "function",
    [lambda s, m: torch.sub(m, s, alpha=2), lambda s, m: torch.add(m, s, alpha=2), lambda s, m: s + 1.0],
    ids=["the weighted scores subtracted", "the scores weighted", "a number"],
)
def test_what_is_no_bias(function: Callable[..., Tensor]) -> None:
    steps, _, scores = read(function, MASK)
    assert not [step for step in steps if step.source is scores and isinstance(step, Add)]


def test_the_scores_subtracted_from_a_bias_are_negated() -> None:
    for function in (lambda s, m: m - s, lambda s, m: torch.rsub(s, m)):
        steps, _, scores = read(function, MASK)
        (step,) = (step for step in steps if step.source is scores)
        assert isinstance(step, Add)
        assert (step.weight, step.negates) == (1.0, True)


@pytest.mark.parametrize(
    ("function", "inverted", "fill"),
    [
        (lambda s, c: torch.where(c, s, LOWEST), False, LOWEST),
        (lambda s, c: torch.where(c, -torch.inf, s), True, -torch.inf),
        (lambda s, c: torch.where(c, s, torch.tensor(-1e9)), False, -1e9),
        (lambda s, c: s.masked_fill(c, -torch.inf), True, -torch.inf),
        (lambda s, c: s.masked_fill_(c, -1e9), True, -1e9),
        (lambda s, c: s.masked_fill(c, torch.tensor(LOWEST)), True, LOWEST),
    ],
)
def test_keep(function: Callable[..., Tensor], inverted: bool, fill: float) -> None:
    step = _one(function, ALLOWED)
    assert isinstance(step, Keep)
    assert step.inverted == inverted
    assert step.fill == pytest.approx(fill)


@pytest.mark.parametrize("fill", [-1e4, -111.0])
def test_a_fill_that_may_mask_is_told(fill: float) -> None:
    """Beside which scores it does, fills.py says."""
    assert [step.fill for step in read(lambda s, c: s.masked_fill(c, fill), ALLOWED)[0]] == [fill]  # type: ignore[attr-defined]


@pytest.mark.parametrize("fill", [0.0, -1.0, -110.0, 1e9])
def test_a_fill_that_masks_nothing_is_no_mask(fill: float) -> None:
    assert read(lambda s, c: s.masked_fill(c, fill), ALLOWED)[0] == []
    assert read(lambda s, c: torch.where(c, s, fill), ALLOWED)[0] == []


def test_a_fill_that_is_not_known_is_no_mask() -> None:
    assert read(lambda s, c, x: torch.where(c, s, x), ALLOWED, torch.tensor(-1e9))[0] == []


@pytest.mark.parametrize(
    "function",
    [
        lambda s: torch.max(s, torch.tensor(LOWEST)),
        lambda s: torch.maximum(torch.tensor(LOWEST), s),
        lambda s: s.clamp(min=LOWEST),
        lambda s: s.nan_to_num(),
        lambda s: s.nan_to_num(neginf=LOWEST),
        lambda s: s.clamp_min(LOWEST),
        lambda s: s.clamp(LOWEST, -LOWEST),
    ],
)
def test_floor(function: Callable[..., Tensor]) -> None:
    step = _one(function)
    assert isinstance(step, Clamp)
    assert step.low == pytest.approx(LOWEST)
    assert step.of_dtype


@pytest.mark.parametrize("function", [lambda s: s.clamp(min=0), lambda s: s.clamp(max=5.0), lambda s: s.clamp_max(5.0)])
def test_a_clamp_that_shows_is_no_floor(function: Callable[..., Tensor]) -> None:
    assert read(function)[0] == []


@pytest.mark.parametrize(
    "function",
    [
        lambda s: s - s.amax(-1, keepdim=True),
        lambda s: s - s.max(dim=-1, keepdim=True).values,
        lambda s: s - s.max(-1, keepdim=True)[0].detach(),
        lambda s: s - s.amax([3], keepdim=True),
    ],
)
def test_shift_by_the_largest_score(function: Callable[..., Tensor]) -> None:
    step = _one(function)
    assert isinstance(step, Shift)
    assert step.uses


@pytest.mark.parametrize(
    "function",
    [
        lambda s: s - s.amin(-1, keepdim=True),
        lambda s: s - s.amax(-2, keepdim=True),
        lambda s: s - s.amax((-1, -2), keepdim=True),
        lambda s: s - (s * 2).amax(-1, keepdim=True),
        lambda s: s - s.mean(-1, keepdim=True),
        lambda s: torch.sub(s, s.amax(-1, keepdim=True), alpha=2),
    ],
)
def test_what_is_no_shift(function: Callable[..., Tensor]) -> None:
    assert not [step for step in read(function)[0] if isinstance(step, Shift)]


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda s: s.double(), Cast),
        (lambda s: s.to(torch.bfloat16), Cast),
        (lambda s: s.type_as(torch.ones(1, dtype=torch.float64)), Cast),
        (lambda s: s.tanh(), Change),
        (lambda s: s.view(8, 5, 6), View),
        (lambda s: s.float(), View),
        (lambda s: torch.dropout(s, 0.1, False), View),
    ],
)
def test_casts_views_and_tanh(function: Callable[..., Tensor], kind: type[Step]) -> None:
    if kind is View:
        # What changes nothing may leave no node behind at all.
        steps, _, _ = read(function)
        assert [type(step) for step in steps] in ([View], [])
    else:
        assert isinstance(_one(function), kind)


def test_sink_column() -> None:
    step = _one(lambda s, c: torch.cat([s, c.expand(2, 4, 5, 1)], dim=-1), torch.zeros(1, 4, 1, 1))
    assert isinstance(step, SinkColumn)


@pytest.mark.parametrize(
    "function",
    [
        lambda s, c: torch.cat([s, s], dim=-1),
        lambda s, c: torch.cat([s, s[:, :, :1]], dim=2),
        lambda s, c: torch.cat([s, c.expand(2, 4, 5, 1), c.expand(2, 4, 5, 1)], dim=-1),
    ],
    ids=["two of them", "another axis", "three parts"],
)
def test_what_is_no_sink_column(function: Callable[..., Tensor]) -> None:
    steps, _, scores = read(function, torch.zeros(1, 4, 1, 1))
    assert not [step for step in steps if step.source is scores]


@pytest.mark.parametrize(
    "function",
    [lambda s: s.exp(), lambda s: s.abs(), lambda s: s**2, lambda s: s.int().float(), lambda s: s.cumsum(-1)],
)
def test_other_ops_are_not_understood(function: Callable[..., Tensor]) -> None:
    assert not [step for step in read(function)[0] if not isinstance(step, View)]


def test_every_reader_is_of_an_op_that_exists() -> None:
    assert all(isinstance(op, torch._ops.OpOverload) for op in score_steps.READERS)


@pytest.mark.parametrize(
    "masked",
    [
        lambda s, kept: s.to(torch.bfloat16).masked_fill(~kept, -1e9),
        lambda s, kept: torch.where(kept, s.to(torch.bfloat16), -1e9),
        lambda s, kept: s.to(torch.bfloat16).clamp(min=-1e9),
    ],
)
def test_a_fill_is_a_number_of_the_scores_dtype(masked: Callable[..., Tensor]) -> None:
    """-1e9 is no bfloat16, and what is added beside it may be just as large."""
    (step,) = read(masked, torch.ones(5, 6, dtype=torch.bool))[0]
    fill = step.low if isinstance(step, Clamp) else step.fill  # type: ignore[attr-defined]
    assert fill == float(torch.tensor(-1e9, dtype=torch.bfloat16)) != -1e9


def test_a_fill_that_is_lifted_by_its_rounded_twin_does_not_mask() -> None:
    """In bfloat16 the two add up to 0: the key takes part, with a score of 0."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(4)
        kept = at <= at[:, None]
        scores = torch.where(kept, q @ k.mT, -1e9)
        scores = scores - torch.where((at + at[:, None]) % 3 == 0, -1e9, 0.0).to(scores.dtype)
        return scores.softmax(-1) @ v

    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 2, 4, 8, generator=generator).to(torch.bfloat16) for _ in range(3)]
    function = compiled(attention, strict=True, lowerings=["math", "reference"])
    torch.testing.assert_close(function(*given), attention(*given), atol=2e-2, rtol=2e-2)
