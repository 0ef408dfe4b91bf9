"""A dense mask as bits, an operand of Hopper's leaf ops. Imports no Triton.

A thread loads all that it needs of a mask's tile at once: four words of each of its two rows. As bytes it would take 64 loads. The
backward's tiles are (keys, queries), so its words hold queries.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from attn_compiler.lowerings.base import Emitter
from attn_compiler.lowerings.shared.parts.kernel_plan import Plan

aten = torch.ops.aten

#: names of the operand in the forward and in the backward
NAME = "mask_bits"
BY_KEY = "mask_bits_by_key"
#: keys of a word
BITS = 32
#: A row's words are a multiple of this: Triton is told of multiples of 16, and then loads four at once.
_WORDS = 16

Size = int | fx.Node


def is_there(plan: Plan) -> bool:
    """Return whether the leaf op has the operand."""
    return plan.mask


def emit(emitter: Emitter, mask: fx.Node, seqlen_kv: Size) -> fx.Node:
    """Emit int32 (B|1, Hq|1, Sq|1, words): bit i of word w is set where the row allows key 32 · w + i; no bit beyond the last key. mask:
    bool (B|1, Hq|1, Sq|1, Skv|1)."""
    return emitter.once(("hopper bits", mask, seqlen_kv), lambda: _packed(emitter, mask, seqlen_kv))


def emit_by_key(emitter: Emitter, mask: fx.Node, seqlen_q: Size) -> fx.Node:
    """Emit the same with bits of queries for each key: int32 (B|1, Hq|1, Skv|1, words)."""

    def make() -> fx.Node:
        return _packed(emitter, emitter.call(torch.Tensor.transpose, mask, 2, 3), seqlen_q)

    return emitter.once(("hopper bits by key", mask, seqlen_q), make)


def _packed(emitter: Emitter, mask: fx.Node, length: Size) -> fx.Node:
    """Pack the last axis of a boolean mask into int32 words of 32 bits. Zero bits fill up the last group of _WORDS words."""
    call = emitter.call

    def number(function: Callable[..., Any], a: Size, b: Size) -> Size:
        return function(a, b) if isinstance(a, int) and isinstance(b, int) else call(function, a, b)

    value = emitter.value(mask)
    if value.shape[3] == 1:
        mask = call(torch.Tensor.expand, mask, -1, -1, -1, length)
    step = BITS * _WORDS
    steps = number(operator.floordiv, number(operator.add, length, step - 1), step)
    missing = number(operator.sub, number(operator.mul, steps, step), length)
    padded = call(aten.constant_pad_nd.default, mask, [0, missing], 0)
    of_words = call(torch.Tensor.to, call(torch.Tensor.unflatten, padded, 3, (-1, BITS)), torch.int32)
    bits = call(torch.arange, BITS, dtype=torch.int32, device=value.device)
    words = call(torch.sum, call(torch.bitwise_left_shift, of_words, bits), -1, dtype=torch.int32)
    return call(torch.Tensor.contiguous, words)
