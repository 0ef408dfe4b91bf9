"""Says what a kernel of linear attention is assembled by for Hopper, beside one of somebody else, where Triton is told to take its newer
program and where it is not: python -m tests.lowerings.shared.kernels.assembling

Both kernels are compiled in threads at once, with a cache on disk that both settings share.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import triton
import triton.language as tl

from attn_compiler.lowerings.linear.kernels.pieces import join_pieces
from attn_compiler.lowerings.shared.kernels import releases_assembler_sm90
from attn_compiler.lowerings.shared.launching import compiling
from attn_compiler.spec.assemblers import Assembler, _paths, _release_of
from benchmarks.kernel_code import _Driver

_TENSORS = (triton.MockTensor(tl.float32),) * 5
_NUMBERS = dict.fromkeys(join_pieces.arg_names[5:], 64) | {"DELTA": True, "REVERSED": False, "PARTS": 3}


@triton.jit
def somebody_elses(
    Locals, Wholes, Sums, Edge, Between, heads, chunks, pieces, of_piece, edge_b, edge_h, edge_k, edge_v,
    C: tl.constexpr, DK: tl.constexpr, WK: tl.constexpr, DV: tl.constexpr, WV: tl.constexpr, BV: tl.constexpr, LOCAL: tl.constexpr,
    WIDE: tl.constexpr, DELTA: tl.constexpr, REVERSED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    tl.store(Between + tl.arange(0, C), tl.load(Locals + tl.arange(0, C)))


def _compiled(kernel: Any) -> tuple[str, Any]:
    """By a launch that Triton is asked for ahead, in this thread."""
    kernel.device_caches.clear()
    (asked,) = compiling.variants(kernel, _TENSORS, _NUMBERS)
    return asked.key, asked.compile()


def _launched(kernel: Any) -> Any:
    """By a launch itself."""
    kernel.device_caches.clear()
    return kernel.warmup(*_TENSORS, grid=(1,), **_NUMBERS)


def _found(is_told: bool) -> dict[str, Any]:
    chosen = Assembler(release=(13, 1), program=_paths("ptxas-blackwell")[0] if is_told else "")
    with (
        mock.patch.object(releases_assembler_sm90, "hopper_assembler", return_value=chosen),
        ThreadPoolExecutor(4) as threads,
    ):
        kernels = (join_pieces, somebody_elses)
        ours, others = threads.map(_compiled, kernels)
        launched = _launched(join_pieces)
    return {
        "ours": _maker(ours[1].asm["cubin"]),
        "others": _maker(others[1].asm["cubin"]),
        "launched": launched.hash == ours[1].hash,
        "keys": [hashlib.sha256(key.encode()).hexdigest() for key, _ in (ours, others)],
        "hashes": [kernel.hash for _, kernel in (ours, others)],
    }


def _maker(cubin: bytes) -> str:
    """The release of CUDA that a cubin names; assemblers before 13.0 name none."""
    found = re.search(rb"Cuda compilation tools, release ([\d.]+)", cubin)
    return "" if found is None else found[1].decode()


def main() -> None:
    triton.runtime.driver.set_active(_Driver())
    programs = {name: ".".join(map(str, _release_of(name))) for name in ("ptxas", "ptxas-blackwell")}
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        found = [_found(is_told) for is_told in (False, True, False)]
    json.dump([{"programs": programs}, *found], sys.stdout)


if __name__ == "__main__":
    main()
