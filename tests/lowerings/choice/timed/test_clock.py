"""Long is told from short without the host's time, and what waits for the GPU has none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attn_compiler.lowerings.choice.timed import clock

pytestmark = pytest.mark.gpu


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
