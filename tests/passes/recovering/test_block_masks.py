"""Blocks that are those of their mask_mod by what both read as, and others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attn_compiler.options.options import Options
from attn_compiler.passes.graph import mirroring
from attn_compiler.passes.graph.spelling import Spelling
from attn_compiler.passes.graph.unit import Unit, units
from attn_compiler.passes.recovering import block_masks
from attn_compiler.passes.recovering.reading.readers import Readers
from attn_compiler.passes.spelling import plain_calls
from attn_compiler.reasons.codes import Code
from attn_compiler.torch_private import tracing as torch_tracing
from tests.passes.compiling import captured

LENGTH = 200


def _causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def _backwards(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q <= k


def _checked(blocks_of: Any, *, strict: bool = True) -> tuple[Unit, Spelling, list[fx.Node]]:
    """A graph whose block mask has blocks of one mask_mod, and says another: its calls, and those that are left alone."""

    def function(q: Tensor) -> Any:
        block_mask = create_block_mask(blocks_of, None, None, LENGTH, LENGTH, device="cpu")
        block_mask.mask_mod = _causal
        return flex_attention(q, q, q, block_mask=block_mask)

    gm, _ = captured(function, torch.randn(1, 2, LENGTH, 16))
    (unit,) = units(gm, Options(strict=strict))
    with torch_tracing.tracing_in(unit.mode):
        unit.spelling = plain_calls.spell_out(unit)
        unit.mirror = mirroring.trace_mirror(unit)
        found = block_masks.checked(unit, unit.mirror, unit.spelling, Readers())
    return unit, found, list(found.left)


def test_blocks_of_the_mask_mod_stay() -> None:
    unit, found, left = _checked(_causal)
    assert found is unit.spelling
    assert len(found.calls) == 1
    assert left == []


def test_blocks_of_another_mask_mod_leave_the_call_alone() -> None:
    _, found, left = _checked(_backwards)
    (one,) = found.calls
    assert left == [one.call]
    assert found.left[one.call].code is Code.FLEX_BLOCK_MASK
    assert "its blocks are those of" in found.left[one.call].observed
