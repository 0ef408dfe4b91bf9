"""Tests of which a few run by default and the others with `-m slow`, and what is made for those of them that run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def in_full(values: Iterable[Any], *, daily: Callable[[Any], bool] | Collection[Any]) -> list[Any]:
    """All values, for `parametrize`. daily: those of the default run, or what says which those are. The others are slow."""
    is_daily = daily if callable(daily) else daily.__contains__
    return [value if is_daily(value) else pytest.param(value, marks=pytest.mark.slow) for value in values]


def asked_for(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """The values that this module's tests have for the parameter, of the tests that run. A fixture makes nothing else."""
    found: list[Any] = []
    for item in request.session.items:
        given = getattr(item, "callspec", None)
        if item.path == request.path and given is not None and parameter in given.params:
            value = given.params[parameter]
            if value not in found:
                found.append(value)
    return found
