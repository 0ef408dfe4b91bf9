"""Python's cyclic collector is paused, and goes on as it was."""

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
