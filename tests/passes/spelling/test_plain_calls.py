"""Calls are spelled out, and the unit knows which."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from attn_compiler.options.options import Options
from attn_compiler.passes.graph import unit
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.passes.graph.spelling import Spelling
from attn_compiler.passes.graph.unit import Unit, UnitPlace
from attn_compiler.passes.spelling import plain_calls
from attn_compiler.torch_private import tracing as torch_tracing
from tests.passes.compiling import captured


def _spelled(function: object, *args: object) -> tuple[Unit, str, Spelling]:
    """A function's unit, its code before calls were spelled out in it, and what was spelled out."""
    gm, _ = captured(function, *args)  # type: ignore[arg-type]
    mode = torch_tracing.fake_mode_of_values(unit.examples(gm))
    assert mode is not None
    found, before = Unit.of(gm, Options(), UnitPlace(name="", mode=mode)), gm.code
    with torch_tracing.tracing_in(mode):
        return found, before, plain_calls.spell_out(found)


def test_a_module_of_attention_becomes_plain_calls() -> None:
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    found, _, made = _spelled(lambda x: attention(x, x, x, need_weights=False)[0], torch.randn(2, 5, 16))
    assert made.expanded
    assert made.is_any
    calls = {target_name(node) for node in found.graph.nodes if node.op == "call_function"}
    assert "scaled_dot_product_attention" in calls
    assert "multi_head_attention_forward" not in calls


def test_plain_calls_stay() -> None:
    found, before, made = _spelled(lambda q: F.scaled_dot_product_attention(q, q, q), torch.randn(1, 2, 5, 8))
    assert found.graph_module.code == before
    assert [*made.expanded, *made.calls, *made.left, *made.moved] == []
    assert not made.is_any
