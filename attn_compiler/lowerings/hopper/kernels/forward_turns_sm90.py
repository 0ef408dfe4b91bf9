"""Turns of two warpgroups of a forward at the tensor cores, in Gluon: one computes its softmax while the other has its products."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def await_products(consumer: gl.constexpr, how: gl.constexpr):
    """Wait for this warpgroup's turn at a hardware barrier, one for each of two warpgroups, of the threads of both. Triton leaves these
    alone."""
    if how.TURNS:
        ASM: gl.constexpr = "bar.sync " + ("14" if consumer == 0 else "15") + ", 256; mov.u32 $0, $1;"
        gl.inline_asm_elementwise(ASM, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def give_products(consumer: gl.constexpr, how: gl.constexpr):
    """Give the turn to the other warpgroup."""
    if how.TURNS:
        ASM: gl.constexpr = "bar.arrive " + ("15" if consumer == 0 else "14") + ", 256; mov.u32 $0, $1;"
        gl.inline_asm_elementwise(ASM, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)
