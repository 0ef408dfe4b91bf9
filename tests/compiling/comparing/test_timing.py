"""Steps that are timed in turn."""

from __future__ import annotations

from collections.abc import Callable

from attn_compiler.compiling.comparing import timing


def _noting(calls: list[str], name: str) -> Callable[[], None]:
    return lambda: calls.append(name)


def test_ratio_is_the_median_of_the_rounds_own_and_above_one_when_we_are_faster() -> None:
    # The machine slows down threefold half-way: the rounds' ratios stay 2, the ratio of a mixed pair would not.
    baseline, ours = [2.0, 2.0, 6.0, 6.0], [1.0, 1.0, 3.0, 3.0]
    assert timing.ratio(baseline, ours) == 2.0


def test_interleave_takes_turns_and_turns_the_order() -> None:
    calls: list[str] = []
    steps = {name: _noting(calls, name) for name in ("a", "b")}
    times = timing.interleave(steps, "cpu", seconds=0, min_rounds=4, warmup=0)
    assert calls == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert [len(values) for values in times.values()] == [4, 4]


def test_what_comes_before_a_step_is_called_ahead_of_each() -> None:
    calls: list[str] = []
    step = {"a": _noting(calls, "a")}
    timing.interleave(step, "cpu", seconds=0, min_rounds=2, warmup=1, before=_noting(calls, "before"))
    assert calls == ["before", "a"] * 3


def test_percentiles() -> None:
    assert timing.percentiles([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == (2.0, 3.5, 5.0)
