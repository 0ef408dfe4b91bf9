"""Turns at the tensor cores: each warpgroup waits at a barrier of the hardware that the other one alone arrives at."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_compiler.lowerings.hopper.kernels import forward_turns_sm90
from attn_compiler.lowerings.hopper.plan import BLOCKS, THREE
from tests.lowerings.shared.kernels import gluon_in_torch


@pytest.mark.parametrize("blocks", [BLOCKS[64], THREE])
def test_turns(blocks: Any) -> None:
    said: list[str] = []
    functions = gluon_in_torch.scope(forward_turns_sm90, (0,), (1,))
    functions["gl"].inline_asm_elementwise = lambda asm, *args, **given: said.append(asm.split(";")[0])
    how = type("How", (), {"TURNS": blocks.takes_turns})
    for consumer in range(2):
        functions["await_products"](consumer, how)
        functions["give_products"](consumer, how)
    turns = ["bar.sync 14, 256", "bar.arrive 15, 256", "bar.sync 15, 256", "bar.arrive 14, 256"]
    assert said == (turns if blocks.consumers == 2 else [])
