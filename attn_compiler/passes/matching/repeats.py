"""Modules that share a body: `torch.compiler.nested_compile_region` traces equal layers once, and calls the trace for each."""

from __future__ import annotations

from attn_compiler.passes.graph.unit import BodyCall, Unit, module_path


def modules(unit: Unit, module: str) -> tuple[str, ...]:
    """Return the path of a unit's module in each of its runs, in order. module: its path in the first run, which was traced."""
    if not unit.place.calls:
        return (module,)
    first = module_path(unit.place.calls[0].node)
    return tuple(path for call in unit.place.calls for path in modules(call.unit, _at(call, module, first)))


def _at(call: BodyCall, module: str, first: str) -> str:
    """Path of a module in one run. If the region is no method of a module, its runs can't be told apart."""
    inside = module == first or module.startswith(f"{first}.")
    return module_path(call.node) + module.removeprefix(first) if inside else module
