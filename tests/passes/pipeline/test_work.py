"""What there is of a rewriting while it goes on."""

from __future__ import annotations

import pytest
from torch import fx

from attn_compiler.options.options import Options
from attn_compiler.passes.pipeline.work import Work, located, timed
from attn_compiler.reasons.errors import PassFailed, UnknownOption


def test_seconds_of_a_part_are_added_up() -> None:
    work = Work(gm=fx.symbolic_trace(lambda x: x), options=Options())
    work.seconds["match"] = 1.0
    with timed("match", work.seconds):
        pass
    assert 1.0 <= work.seconds["match"] < 2.0


def test_time_counts_where_the_part_fails() -> None:
    seconds = {"match": 0.0}
    with pytest.raises(KeyError), timed("match", seconds):
        raise KeyError
    assert seconds["match"] > 0


def test_an_exception_says_which_pass_it_came_from() -> None:
    with pytest.raises(PassFailed, match="recover"), located("recover", None):
        raise ZeroDivisionError
    own = UnknownOption.__new__(UnknownOption)
    with pytest.raises(UnknownOption) as found, located("recover", None):
        raise own
    assert found.value is own
