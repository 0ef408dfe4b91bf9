"""Calls that stand for others, spelled out beside them: the steps that a graph goes through before it is mirrored.

Each takes what the steps before it did, and gives that with its own part. What fails at one call leaves that call as it is.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from torch import fx

from attn_compiler.passes.graph import faults
from attn_compiler.passes.graph.calls import Trying
from attn_compiler.passes.graph.spelling import Spelling
from attn_compiler.passes.graph.unit import Unit, module_path
from attn_compiler.passes.spelling import dtensors, expand, flex, joined_keys, keys_last, library_calls


def expanded(unit: Unit, spelling: Spelling) -> Spelling:
    """Calls that hide an attention, such as F.multi_head_attention_forward, are what they compute."""
    return replace(spelling, expanded=tuple(expand.expand_calls(unit.graph_module, _trying(unit))))


def on_local_tensors(unit: Unit, spelling: Spelling) -> Spelling:
    """Calls on DTensors are calls on their local tensors."""
    found = dtensors.spell_dtensors(unit.graph_module, unit.mode, _trying(unit))
    return replace(spelling.leaving(found.left), local=found.local)


def of_flex(unit: Unit, spelling: Spelling) -> Spelling:
    """Beside FlexAttention's calls stands what they compute."""
    found = flex.spell_flex(unit.graph_module, _trying(unit))
    return replace(spelling.leaving(found.left), calls=(*spelling.calls, *found.spelled))


def of_libraries(unit: Unit, spelling: Spelling) -> Spelling:
    """Beside calls of libraries' kernels stands what they compute."""
    found = library_calls.spell_library_calls(unit.graph_module, _trying(unit))
    return replace(spelling.leaving(found.left), calls=(*spelling.calls, *found.spelled))


def with_keys_last(unit: Unit, spelling: Spelling) -> Spelling:
    """Softmaxes run over the last axis. Beside one over joined scores stands an attention over joined keys."""
    moved = tuple(keys_last.put_keys_last(unit.graph_module, unit.mode, _trying(unit)))
    joined = joined_keys.spell_joined(unit.graph_module, _trying(unit))
    return replace(spelling, moved=moved, calls=(*spelling.calls, *joined))


def given_back(unit: Unit, spelling: Spelling) -> None:
    """Leave of each call that was spelled out beside itself either the call, or what took its place."""
    flex.give_back(unit.graph_module, spelling.calls)


def spell_out(unit: Unit) -> Spelling:
    """All of these steps, for a graph that goes through no others."""
    found = Spelling()
    for step in (expanded, on_local_tensors, of_flex, of_libraries, with_keys_last):
        found = step(unit, found)
    return found


def _trying(unit: Unit) -> Trying:
    def trying(call: fx.Node) -> contextlib.AbstractContextManager[object]:
        return faults.confined(unit.log, "expand", module_path(call))

    return trying
