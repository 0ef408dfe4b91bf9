"""The modules that share a body: `torch.compiler.nested_compile_region` traces equal layers once, and calls what it made for each."""

from __future__ import annotations

from attn_compiler.passes.graph.unit import BodyCall, Unit, module_path


def modules(unit: Unit, module: str) -> tuple[str, ...]:
    """The path of a module of a unit in each of its runs, in their order. module: its path in the first one, which is what was traced."""
    if not unit.place.calls:
        return (module,)
    first = module_path(unit.place.calls[0].node)
    return tuple(path for call in unit.place.calls for path in modules(call.unit, _at(call, module, first)))


def _at(call: BodyCall, module: str, first: str) -> str:
    """Where a region is no method of a module, nothing tells its runs apart."""
    inside = module == first or module.startswith(f"{first}.")
    return module_path(call.node) + module.removeprefix(first) if inside else module
