"""The sites that the FP8 recipe applies to: all but those that its patterns exclude. It becomes part of their specs."""

from __future__ import annotations

import dataclasses
import fnmatch
import warnings

from attn_compiler.lowerings.base import FP8, check_fp8_inputs
from attn_compiler.passes.graph.unit import FoundSites, Unit, paths_of_runs
from attn_compiler.passes.writing import buffers
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.errors import AttnCompilerWarning, shortened
from attn_compiler.reasons.fp8_errors import Fp8RecipeUnused
from attn_compiler.reporting.facts import SiteReport
from attn_compiler.reporting.report import Report
from attn_compiler.spec.fp8_recipe import DelayedScaling, Fp8Recipe


def ask_for_fp8(unit: Unit, found: FoundSites) -> None:
    """Put the recipe into the specs of a unit's sites, and note on the others why it is not there."""
    recipe, options = unit.options.fp8_recipe, unit.options
    if recipe is None:
        return
    asked = options.lowerings if options.lowering is None else (options.lowering,)
    no_buffers = buffers.why_not(unit) if isinstance(recipe.scaling, DelayedScaling) else None
    for site in found.sites:
        # Layers that share one body are all in FP8, or none of them is.
        excluding = map(recipe.excluding, paths_of_runs(unit, site.module))
        pattern = next((pattern for pattern in excluding if pattern is not None), None)
        if pattern is not None:
            site.notes.append(f"fp8_recipe: excluded by the pattern {pattern!r}")
        elif no_buffers is not None:
            site.notes.append(f"fp8_recipe: ignored, no history can be kept: {no_buffers}; use CurrentScaling")
        elif site.spec is not None:
            site.spec = dataclasses.replace(site.spec, fp8=recipe.for_site())
            if asked is not None and not set(asked) & set(FP8):
                site.notes.append(f"fp8_recipe: ignored, the lowerings asked for ({', '.join(asked)}) run in no FP8")


def check_recipe_used(recipe: Fp8Recipe, report: Report, *, is_whole: bool) -> None:
    """Warn of what users would not look into a report for: patterns that exclude all or none, a model in float32, or another GPU.

    is_whole: the graph is all of its frame; in a part, patterns may well exclude all or none. Raises Fp8RecipeUnused if they exclude all.
    """
    modules = tuple(module for site in report.sites for module in site.modules)
    if modules and is_whole:
        _check_patterns(recipe, modules)
    ignored = [_ignored(site) for site in report.sites if site.spec.fp8 is not None]
    if ignored and all(ignored):
        _warn(ignored[0])


def _ignored(site: SiteReport) -> str:
    """Return why no site in this dtype, or on this GPU, has a kernel in FP8, or ""."""
    if inputs := check_fp8_inputs(site.spec):
        return f"{inputs[0].observed}; {inputs[0].advice}"
    refused = [reason for each in site.decision.refusals if each.lowering in FP8 for reason in each.reasons]
    machine = [reason.observed for reason in refused if reason.code is Code.ARCHITECTURE]
    if site.decision.lowering in FP8 or not machine:
        return ""
    return f"no kernel in FP8 serves {machine[0]}: the attention runs in {site.spec.dtype}"


def _check_patterns(recipe: Fp8Recipe, modules: tuple[str, ...]) -> None:
    if all(recipe.excluding(module) is not None for module in modules):
        raise Fp8RecipeUnused(modules=modules, exclude=recipe.exclude)
    for pattern in recipe.exclude:
        if not any(fnmatch.fnmatchcase(module, pattern) for module in modules):
            _warn(
                f"the pattern {pattern!r} excludes none of the attentions found ({shortened(modules)}). Paths begin at what is compiled: "
                "where a graph breaks, at a part of the model, where '*layers.0.*' finds a layer, too; if a layer is compiled by itself, "
                "at the layer, which keeps its precision when it is compiled without a recipe"
            )


def _warn(what: str) -> None:
    warnings.warn(f"fp8_recipe: {what}", AttnCompilerWarning, stacklevel=2)
