"""Which block of queries a program of a persistent kernel takes next, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def turn(nth, section, blocks, heads_of_all):
    """This program's nth block of queries: whether there is one, its number within its head, and its head among those of all batch rows.

    `section` heads take turns block by block before the next ones do: their keys and values should fit the L2 cache. Under a causal mask
    a block's length grows with its number. Blocks go up and down through the sections, last down, and every other round of programs takes
    them in reverse order, so that all programs get about the same in all, and short ones last.
    """
    programs, own = gl.num_programs(0), gl.program_id(0)
    i = nth * programs + own + (nth % 2) * (programs - 1 - 2 * own)
    of_section, within = i // (section * blocks), i % (section * blocks)
    together = gl.maximum(gl.minimum(section, heads_of_all - of_section * section), 1)
    block = within // together
    is_down = ((heads_of_all - 1) // section - of_section) % 2 == 0
    block = gl.where(is_down, blocks - 1 - block, block)
    return i < blocks * heads_of_all, block, of_section * section + within % together
