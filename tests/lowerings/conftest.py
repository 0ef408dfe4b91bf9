"""What every test of a lowering shares: nothing is known of the calls of others, and no kernel fails unseen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from attn_compiler.lowerings.shared.calls.failures import FAILURES
from attn_compiler.lowerings.shared.launching import replaying
from attn_compiler.lowerings.shared.launching.on_device import KnownCalls


@pytest.fixture(autouse=True)
def known_calls(monkeypatch: pytest.MonkeyPatch) -> KnownCalls[Any]:
    """Calls whose launches are kept, to be replayed for those that lie alike."""
    calls = KnownCalls[Any]()
    monkeypatch.setattr(replaying, "_CACHES", calls)
    return calls


@pytest.fixture(autouse=True)
def no_kernel_fails_unseen() -> Iterator[None]:
    """Plain ops take the place of a kernel that fails, and their numbers are right: a test would hold them for the kernel's.

    A test that plants one uses `planted_failures`.
    """
    yield
    if failed := dict(FAILURES.causes):
        FAILURES.forget()
    assert failed == {}


@pytest.fixture
def planted_failures() -> Iterator[None]:
    """Forget what a test has fail on purpose."""
    yield
    FAILURES.forget()
