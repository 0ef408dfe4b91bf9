"""Tests of which a few run by default and the others in CI or with `-m slow`, and what is made for those of them that run.

A test that says the same of many values runs by default for a few of them. `further` are the others, which CI runs before each merge.
`slow` are those that are too long for CI. A test whose parameters are many, or cross, says so by the mark `in_turns`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import pytest

#: of a value that has marks or a name
_PARAMS = type(pytest.param())


def _marked(values: Iterable[Any], is_daily: Callable[[Any], bool], mark: pytest.MarkDecorator) -> list[Any]:
    return [value if is_daily(value) else pytest.param(value, marks=mark) for value in values]


def _told(daily: Callable[[Any], bool] | Collection[Any]) -> Callable[[Any], bool]:
    return daily if callable(daily) else daily.__contains__


def in_full(values: Iterable[Any], *, daily: Callable[[Any], bool] | Collection[Any]) -> list[Any]:
    """All values, for `parametrize`. daily: those of the default run, or what says which those are. The others are slow."""
    return _marked(values, _told(daily), pytest.mark.slow)


def further(values: Iterable[Any], *, daily: Callable[[Any], bool] | Collection[Any]) -> list[Any]:
    """All values, for `parametrize`. daily: those of the default run, or what says which those are. The others run in CI."""
    return _marked(values, _told(daily), pytest.mark.further)


def firsts(values: Iterable[Any], *told_by: Callable[[Any], Hashable]) -> list[Any]:
    """The first value of each kind, by each way of telling kinds."""
    values = list(values)
    found = []
    for kind in told_by:
        seen = set()
        for value in values:
            if kind(value) not in seen:
                seen.add(kind(value))
                found.append(value)
    return found


def mark_turns(items: Iterable[pytest.Item]) -> None:
    """What `in_turns` leaves to CI of each test. Without it, stacked `parametrize` run every combination every time."""
    for item in items:
        mark = item.get_closest_marker("in_turns")
        if mark is not None and not _is_daily(item, *mark.args):
            item.add_marker(pytest.mark.further)


def _is_daily(item: pytest.Item, nth: int = 1) -> bool:
    """By default each nth value of the longest parameter runs, each with another value of the others."""
    params = item.callspec.params  # type: ignore[attr-defined]
    axes = [_place(params, mark.args[0], mark.args[1]) for mark in item.iter_markers("parametrize")]
    longest = max(size for _, size in axes)
    return any(
        all(place == (at if size == longest else turn % size) for place, size in axes)
        for turn, at in enumerate(range(0, longest, nth))
    )


def _place(params: Mapping[str, Any], names: str | Sequence[str], values: Collection[Any]) -> tuple[int, int]:
    """Which of the values of one `parametrize` a test has, and how many there are."""
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    for at, value in enumerate(values):
        given = value.values if isinstance(value, _PARAMS) else value if len(names) > 1 else (value,)
        if all(_is_same(params[name], x) for name, x in zip(names, given, strict=True)):
            return at, len(values)
    raise AssertionError(f"{names}: {params} are none of the values; is an iterator given to parametrize?")


def _is_same(x: Any, y: Any) -> bool:
    return x is y or (type(x) is type(y) and isinstance(x, (str, int, float)) and x == y)


def asked_for(request: pytest.FixtureRequest, parameter: str, among: Iterable[Any] | None = None) -> list[Any]:
    """The values that tests of this module have for the parameter, of those that run and use the fixture. It makes nothing else.

    among: only those of these, in their order.
    """
    found: list[Any] = []
    for item in request.session.items:
        given = getattr(item, "callspec", None)
        uses = item.path == request.path and request.fixturename in getattr(item, "fixturenames", ())
        if uses and given is not None and parameter in given.params:
            value = given.params[parameter]
            if value not in found:
                found.append(value)
    return found if among is None else [value for value in among if value in found]
