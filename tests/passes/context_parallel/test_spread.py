"""Which graphs have to be matched again."""

from __future__ import annotations

from typing import Any, cast

import pytest

from attn_compiler.passes.context_parallel.decoding import SlotOutcome
from attn_compiler.passes.context_parallel.spread import SequenceRewrite, SlotRewrite, Spread

SEQUENCE = SequenceRewrite(sites=1, misses=0, shared=0, lengths=(4,), done={}, by_value="")
SENT = SlotRewrite(sites=1, misses=0, outcome=SlotOutcome(sent={"layer": None}))
GATHERED = SlotRewrite(sites=1, misses=0, outcome=SlotOutcome(kept={"layer": "it has a gradient"}))


@pytest.mark.parametrize(("rewrite", "expected"), [(SEQUENCE, True), (SENT, True), (GATHERED, False), (None, False)])
def test_a_graph_that_was_written_to_is_another_one(rewrite: Any, expected: bool) -> None:
    nothing = cast(Any, None)
    assert Spread(cp=nothing, beside=(), mirror=nothing, call=(), rewrite=rewrite).is_other_graph is expected
