"""Compiles a kernel that takes its constants in a tuple, and hands it on: python -m tests.lowerings.shared.kernels.compiling_releases"""

from __future__ import annotations

import json
import re
import sys
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attn_compiler.lowerings.shared.kernels.releases import members, of_tile
from attn_compiler.lowerings.shared.limits.triton_releases import FUSION


class How(NamedTuple):
    SIZE: Any
    NAME: Any


@triton.jit
def _handed(Out, HOW: tl.constexpr):
    how: tl.constexpr = members(HOW)
    tl.store(Out + tl.arange(0, how.SIZE), tl.zeros([how.SIZE], tl.float32), mask=of_tile(how.SIZE > 0))


@triton.jit
def _taken(Out, HOW: tl.constexpr):
    how: tl.constexpr = members(HOW)
    if how.NAME == "given":
        tl.store(Out + tl.arange(0, how.SIZE), tl.full([how.SIZE], 1.0, tl.float32))
    _handed(Out, how)


@triton.jit
def _handing_on(Out, HOW: tl.constexpr):
    _taken(Out, HOW)


def _tiles(kernel: Any) -> list[int]:
    """The sizes of what a kernel stores."""
    how = How(SIZE=64, NAME="given")
    source = ASTSource(fn=kernel, signature={"Out": "*fp32", "HOW": "constexpr"}, constexprs={(1,): how}, attrs={})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(FUSION))
    return [int(size) for size in re.findall(r"tt\.store .*tensor<(\d+)x!tt\.ptr", compiled.asm["ttir"])]


def main() -> None:
    json.dump([{"tiles": _tiles(_taken), "handed": _tiles(_handing_on)}], sys.stdout)


if __name__ == "__main__":
    main()
