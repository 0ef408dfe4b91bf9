"""Python's cyclic collector is paused, or looks more rarely, and goes on as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from attn_compiler.torch_private import collector


@pytest.fixture(params=[True, False], ids=["on", "off"])
def enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_it_goes_on_as_it_was(enabled: bool) -> None:
    with collector.paused():
        assert not gc.isenabled()
        with collector.paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() is enabled


def test_it_goes_on_after_an_error(enabled: bool) -> None:
    with pytest.raises(ZeroDivisionError), collector.paused():
        raise ZeroDivisionError
    assert gc.isenabled() is enabled


@pytest.fixture
def young(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many new objects start a collection outside of the block."""
    before = gc.get_threshold()
    gc.set_threshold(request.param, *before[1:])
    yield request.param
    gc.set_threshold(*before)


@pytest.mark.parametrize("young", [700, 2000], indirect=True)
def test_it_looks_more_rarely_within(young: int) -> None:
    before = gc.get_threshold()
    with collector.rarely():
        assert gc.get_threshold() == (50_000, *before[1:])
        with collector.rarely():
            assert gc.get_threshold()[0] == 50_000
        assert gc.get_threshold()[0] == 50_000
    assert gc.get_threshold() == before
    with pytest.raises(ZeroDivisionError), collector.rarely():
        raise ZeroDivisionError
    assert gc.get_threshold() == before


@pytest.mark.parametrize("young", [700], indirect=True)
def test_what_is_set_within_stays(young: int) -> None:
    with collector.rarely():
        gc.set_threshold(1234, 3, 3)
    assert gc.get_threshold() == (1234, 3, 3)


@pytest.mark.parametrize("young", [0, 80_000], indirect=True)
def test_who_has_it_look_more_rarely_yet_is_left_alone(young: int) -> None:
    with collector.rarely():
        assert gc.get_threshold()[0] == young
