"""What a graph's calls were spelled out as, added up step by step."""

from __future__ import annotations

from torch import fx

from attn_compiler.passes.graph.spelling import Spelling
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason

REASON = Reason(code=Code.FAULT, rule="a rule", observed="something else")


def test_calls_that_are_left_come_after_those_before() -> None:
    first, second = fx.Graph().placeholder("first"), fx.Graph().placeholder("second")
    one = Spelling(moved=("softmax",)).leaving({first: REASON})
    both = one.leaving({second: REASON})
    assert list(one.left) == [first]
    assert list(both.left) == [first, second]
    assert both.moved == ("softmax",)
    assert both.leaving({}) is both


def test_a_graph_is_as_it_came_until_something_was_spelled_out() -> None:
    assert not Spelling().is_any
    assert not Spelling(left={fx.Graph().placeholder("x"): REASON}).is_any
    assert Spelling(expanded=("multi_head_attention_forward",)).is_any
    assert Spelling(local={fx.Graph().placeholder("x"): "said"}).is_any
