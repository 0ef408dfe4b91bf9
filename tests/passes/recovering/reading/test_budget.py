"""What reading costs grows with the graph, and ends: counted in calls and steps, never timed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index
from attn_compiler.index_expr.dividing import divide
from attn_compiler.passes.recovering import reading
from attn_compiler.passes.recovering.reading import Reader, Unreadable
from attn_compiler.passes.recovering.reading.budget import Budget
from attn_compiler.spec.masks import MaskSpec
from tests.passes.compiling import compiled, mirror_of
from tests.passes.recovering.reading.loops import BOUNDED, READ, Calls, Loop

S, MOST = 96, 64

#: twice the graph may take a little more than twice the calls: lists are sorted, and tuples copied
_GROWTH = 2.5
_LOOPS = READ | BOUNDED


def _inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randint(0, MOST, (S,)), torch.randint(0, MOST, (4 * MOST, S))


def _reader(loop: Loop, n: int) -> tuple[Reader, torch.fx.Node]:
    mirror = mirror_of(loop(n), *_inputs())
    (output,) = mirror.graph.output_node().args
    return reading.of(mirror), output[0] if isinstance(output, (list, tuple)) else output  # type: ignore[return-value]


def _calls(loop: Loop, n: int) -> int:
    """Of reading a mask, and of what is done with its expression: it is decided, divided, changed, printed."""
    reader, node = _reader(loop, n)
    ranges = {name: ix.linear(ix.Const(S - 1)) for name in "qk"}
    with Calls() as calls:
        try:
            x = reader.read(node, (Index("q"), Index("k")))
        except Unreadable:
            return calls.count
        x = ix.decide(divide(x, ranges), ranges)
        ix.bounds(ix.as_int(x), ranges)
        ix.is_exact(x)
        ix.substitute(x, Index("k"), Index("q"))
        ix.invert(x)
        list(ix.loads(x))
        ix.text(x, 100)
    return calls.count


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", _LOOPS)
def test_work_grows_no_faster_than_the_graph(name: str) -> None:
    assert _calls(_LOOPS[name], MOST) <= _GROWTH * _calls(_LOOPS[name], MOST // 2)


def _proved(loop: Loop, n: int) -> MaskSpec:
    """The mask of an attention that is compiled; its result is compared with eager's."""

    def function(q: Tensor, m: Tensor, rows: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=loop(n)(m, rows))

    q, inputs = torch.randn(1, 1, S, 8), _inputs()
    run = compiled(function, inner="eager")
    torch.testing.assert_close(run(q, *inputs), function(q, *inputs), equal_nan=True)
    return run.site.spec.mask


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("name", READ)
def test_a_mask_that_is_made_in_a_loop_is_proved(name: str) -> None:
    # What a loop begins with is an alternative, too.
    found = _proved(READ[name], MOST - 1)
    assert found.reason is None
    assert found.kinds or found.dense is None


@pytest.mark.parametrize("name", BOUNDED)
def test_a_mask_that_takes_too_much_stays_dense_and_says_why(name: str) -> None:
    found = _proved(BOUNDED[name], MOST)
    assert found.dense is not None
    assert found.reason is not None
    assert "are the most" in found.reason


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("name", ["choices", "differences", "filled in place", "written by block"])
def test_very_many_steps_are_unreadable_and_no_fault(name: str) -> None:
    """They are read in turn: Python's stack has room for a fifth of them."""
    reader, node = _reader(READ[name], 4 * MOST)
    with pytest.raises(Unreadable, match="in a row"):
        reader.read(node, (Index("q"), Index("k")))


def test_few_steps_are_proved() -> None:
    for name in ("written by row", "both in turn"):
        assert _proved(BOUNDED[name], MOST // 2).reason is None


def test_a_refusal_is_remembered() -> None:
    reader, node = _reader(_LOOPS["rotated"], MOST)
    at = (Index("q"), Index("k"))
    with pytest.raises(Unreadable, match="steps"):
        reader.read(node, at)
    with Calls() as calls, pytest.raises(Unreadable, match="steps"):
        reader.read(node, at)
    assert calls.count < 100


def test_steps_are_those_of_one_mask() -> None:
    """What another mask took is not taken off."""
    mirror = mirror_of(lambda x: ((x + 1).abs(), (x + 2).abs()), torch.arange(S))
    (outputs,) = mirror.graph.output_node().args
    reader = Reader(mirror, reading.READERS, lambda *_: None, budget=Budget(steps=5))
    for node in outputs:  # type: ignore[union-attr]
        reader.read(node, (Index("k"),))  # type: ignore[arg-type]


def test_an_expression_of_too_many_parts_is_gone_on_with_as_a_load() -> None:
    reader, node = _reader(_LOOPS["doubled"], MOST // 2)
    found = reader.read(node, (Index("q"), Index("k")))
    assert found.facts.size <= reader.budget.parts
    assert reader.too_large
    assert all("parts" in reason for reason in reader.too_large.values())


def test_the_budget_grows_with_the_graph() -> None:
    assert (
        Budget.of_graph(1000).steps - Budget.of_graph(500).steps
        == Budget.of_graph(500).steps - Budget.of_graph(0).steps
    )


def test_what_is_too_large() -> None:
    budget = Budget(steps=1, parts=10, depth=5)
    assert budget.too_large(10, 5) is None
    assert budget.too_large(11, 5) == "would be a formula of 11 parts, and 10 are the most"
    assert budget.too_large(10, 6) == "would be a formula 6 parts deep, and 5 are the most"
