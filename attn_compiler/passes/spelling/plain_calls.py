"""Calls that stand for others, spelled out beside them: what every graph goes through before it is mirrored."""

from __future__ import annotations

import contextlib

from torch import fx

from attn_compiler.passes.graph import faults
from attn_compiler.passes.graph.unit import Unit, module_path
from attn_compiler.passes.spelling import dtensors, expand, flex, keys_last, library_calls


def spell_out(unit: Unit) -> None:
    """Fills what the unit knows of calls that were expanded, moved, or left as they are."""

    def trying(call: fx.Node) -> contextlib.AbstractContextManager[object]:
        return faults.confined(unit, "expand", module_path(call))

    unit.expanded = expand.run(unit.graph_module, trying)
    shared = dtensors.run(unit.graph_module, unit.mode, trying)
    unit.local.update(shared.local)
    unit.untried.update(shared.left)
    found = flex.run(unit.graph_module, trying)
    unit.spelled.extend(found.spelled)
    unit.untried.update(found.left)
    of_libraries = library_calls.run(unit.graph_module, trying)
    unit.spelled.extend(of_libraries.spelled)
    unit.untried.update(of_libraries.left)
    unit.moved = keys_last.run(unit.graph_module, unit.mode, trying)
