"""Which sites the FP8 recipe applies to: all but those that its patterns exclude. It becomes part of their specs."""

from __future__ import annotations

import dataclasses
import fnmatch
import warnings

from attn_compiler.errors import AttnCompilerWarning, Fp8RecipeUnused, shortened
from attn_compiler.fp8_recipe import DelayedScaling, Fp8Recipe
from attn_compiler.lowerings import priorities
from attn_compiler.passes import buffers
from attn_compiler.passes.unit import Unit
from attn_compiler.report import Report


def apply(unit: Unit) -> None:
    """Put the recipe into the specs of a unit's sites, and say of the others why it is not there."""
    recipe, options = unit.options.fp8_recipe, unit.options
    if recipe is None:
        return
    asked = options.lowerings if options.lowering is None else (options.lowering,)
    no_buffers = buffers.why_not(unit) if isinstance(recipe.scaling, DelayedScaling) else None
    for site in unit.sites:
        pattern = recipe.excluding(site.module)
        if pattern is not None:
            site.notes.append(f"fp8_recipe: excluded by the pattern {pattern!r}")
        elif no_buffers is not None:
            site.notes.append(f"fp8_recipe: ignored, no history can be kept: {no_buffers}; use CurrentScaling")
        elif site.spec is not None:
            site.spec = dataclasses.replace(site.spec, fp8=recipe.of_a_site())
            if asked is not None and not set(asked) & set(priorities.FP8):
                site.notes.append(f"fp8_recipe: ignored, the lowerings asked for ({', '.join(asked)}) run in no FP8")


def check_patterns(recipe: Fp8Recipe, report: Report) -> None:
    """Hold a recipe's patterns against the attentions of a graph that is all of its frame: of a part, they may well exclude all or none.

    Raises Fp8RecipeUnused if they exclude all; warns of each that excludes none.
    """
    modules = tuple(module for site in report.sites for module in site.modules)
    if not modules:
        return
    if all(recipe.excluding(module) is not None for module in modules):
        raise Fp8RecipeUnused(modules=modules, exclude=recipe.exclude)
    for pattern in recipe.exclude:
        if not any(fnmatch.fnmatchcase(module, pattern) for module in modules):
            warnings.warn(
                f"fp8_recipe: the pattern {pattern!r} excludes none of the attentions found ({shortened(modules)}). Paths are those of "
                "modules within what is compiled: a layer that is compiled by itself, or called after a graph break, has none",
                AttnCompilerWarning,
                stacklevel=2,
            )
