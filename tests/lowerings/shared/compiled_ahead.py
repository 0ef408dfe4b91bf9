"""Compiles the small kernels of tile lists in a thread, for a GPU that is not there: python -m tests.lowerings.shared.compiled_ahead

In a process of its own, since Triton's interpreter, which the other tests use, compiles nothing.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from typing import Any

import torch
import triton

from attn_compiler.lowerings.shared.calls import listing_launch
from attn_compiler.lowerings.shared.kernels.tile_lists import tile_lists
from attn_compiler.lowerings.shared.launching import ahead, compiling, dry_tensors
from attn_compiler.lowerings.shared.ops.listing import OPEN
from benchmarks.kernel_code import _Driver


class _Building(_Driver):
    """Says which launchers are built, and in which thread."""

    def __init__(self) -> None:
        self.built: list[tuple[str, str]] = []

    def launcher_cls(self, src: Any, metadata: Any) -> None:
        self.built.append((metadata.name, threading.current_thread().name))


def main() -> None:
    triton.runtime.driver.set_active(driver := _Building())
    keys = torch.ones(2, 100, dtype=torch.bool)
    given = (None, keys, None, None, None, 64, 100, OPEN, 0, False, 64, 32, False, True)
    call = ahead.LaunchingCall(body=listing_launch.lists, arguments=dry_tensors.described(given), named=())
    workers, left = compiling.workers(2), []
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        first, again = (ahead.Ahead(begin=workers.begin) for _ in range(2))
        ahead.note_launches(call, first.note)
        begun = [future.result().kernel for future in first.started]
        (kernel,) = tile_lists.device_caches[0][0].values()
        ahead.note_launches(call, again.note)
        ahead.note_launches(call, lambda *asked: left.extend(compiling.variants(*asked)))
    seconds = sum(seconds for _, seconds in first.built().seconds)
    found = {
        "begun": begun,
        "begun_again": [future.result().kernel for future in again.started],
        "left": [asked.key for asked in left],
        "loaded_on_a_device": kernel.module is not None,
        "seconds": seconds,
        "launchers": sorted(driver.built),
    }
    json.dump([found], sys.stdout)


if __name__ == "__main__":
    main()
