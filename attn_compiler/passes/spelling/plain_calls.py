"""Steps that write out calls before a graph is mirrored, in their place or beside them.

Each step takes the result of the previous steps, and returns it with its own part. A failure at one call leaves that call as it is.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from torch import fx

from attn_compiler.passes.graph import faults
from attn_compiler.passes.graph.calls import Trying
from attn_compiler.passes.graph.spelling import Spelling
from attn_compiler.passes.graph.unit import Unit, module_path
from attn_compiler.passes.spelling import dtensors, expand, flex, joined_keys, keys_last, library_calls, quantised


def expanded(unit: Unit, spelling: Spelling) -> Spelling:
    """Replace calls that hide an attention, such as F.multi_head_attention_forward, by their ops.

    With `unpad`, also linear layers that hide how they quantise.
    """
    names = expand.expand_calls(unit.graph_module, _trying(unit))
    if unit.options.packs:
        names += quantised.spell_quantised(unit.graph_module, _trying(unit))
    return replace(spelling, expanded=tuple(names))


def on_local_tensors(unit: Unit, spelling: Spelling) -> Spelling:
    """Replace calls on DTensors by calls on their local tensors."""
    found = dtensors.spell_dtensors(unit.graph_module, unit.mode, _trying(unit))
    return replace(spelling.leaving(found.left), local=found.local)


def of_flex(unit: Unit, spelling: Spelling) -> Spelling:
    """Write out FlexAttention's calls beside them."""
    found = flex.spell_flex(unit.graph_module, _trying(unit))
    return replace(spelling.leaving(found.left), calls=(*spelling.calls, *found.spelled))


def of_libraries(unit: Unit, spelling: Spelling) -> Spelling:
    """Write out calls of libraries' kernels beside them."""
    found = library_calls.spell_library_calls(unit.graph_module, _trying(unit))
    return replace(spelling.leaving(found.left), calls=(*spelling.calls, *found.spelled))


def with_keys_last(unit: Unit, spelling: Spelling) -> Spelling:
    """Move softmaxes to the last axis. Beside a softmax over joined scores, write an attention over joined keys."""
    moved = keys_last.put_keys_last(unit.graph_module, unit.mode, _trying(unit))
    local = {moved.get(node, node): note for node, note in spelling.local.items()}
    joined = joined_keys.spell_joined(unit.graph_module, _trying(unit))
    return replace(spelling, moved=tuple(node.name for node in moved), local=local, calls=(*spelling.calls, *joined))


def given_back(unit: Unit, spelling: Spelling) -> None:
    """For each call written out beside itself, keep either the call or its replacement."""
    flex.give_back(unit.graph_module, spelling.calls)


def spell_out(unit: Unit) -> Spelling:
    """Run all of these steps, for a graph that goes through no others."""
    found = Spelling()
    for step in (expanded, on_local_tensors, of_flex, of_libraries, with_keys_last):
        found = step(unit, found)
    return found


def _trying(unit: Unit) -> Trying:
    def trying(call: fx.Node) -> contextlib.AbstractContextManager[object]:
        return faults.confined(unit.log, "expand", module_path(call))

    return trying
