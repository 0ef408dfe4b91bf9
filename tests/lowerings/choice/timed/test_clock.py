"""Long is told from short without the host's time, and what waits for the GPU has none."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from filelock import FileLock, Timeout

from attn_compiler.lowerings.choice.timed import clock
from attn_compiler.lowerings.choice.timed.values import NoValues


def test_processes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits in vain has no times, and one that is through lets the next go on."""
    monkeypatch.setattr(clock, "_PATIENCE", 0.1)
    gpu = f"test {os.getpid()}"
    with clock.alone_on(gpu):
        with pytest.raises(NoValues, match="other processes"), clock.alone_on(gpu):
            pytest.fail("two at once")
        with clock.alone_on(gpu + " another"):
            pass
    with pytest.raises(KeyError), clock.alone_on(gpu):
        raise KeyError
    with clock.alone_on(gpu):
        pass


def test_one_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model has many sites."""
    waited: list[float] = []

    def acquire(lock: FileLock, timeout: float) -> None:
        waited.append(timeout)
        if len(waited) <= 3:
            raise Timeout(lock.lock_file)

    monkeypatch.setattr(FileLock, "acquire", acquire)
    gpu = f"test {os.getpid()} hangs"
    for _ in range(3):
        with pytest.raises(NoValues), clock.alone_on(gpu):
            pytest.fail("not alone")
    for _ in range(2):
        with clock.alone_on(gpu):
            pass
    assert waited == [clock._PATIENCE, 0, 0, 0, clock._PATIENCE]


@pytest.mark.gpu
@pytest.mark.alone
def test_more_work_takes_longer_and_what_waits_for_the_host_has_no_time() -> None:
    device = torch.device("cuda:0")
    small, large = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for n in (256, 4096))
    computations: dict[str, Callable[[], object]] = {
        "small": lambda: small @ small,
        "large": lambda: large @ large,
        "waits": lambda: float(small.sum()),
    }
    for computation in computations.values():
        # The first call of a library takes longer than the clock waits.
        computation()
    found = clock.microseconds(computations, device)
    assert set(found) == {"small", "large"}
    assert 0 < found["small"] < found["large"] / 4
    torch.cuda.synchronize()
