"""Errors of FP8: unused recipes, and histories that do not fit. See errors.py."""

from __future__ import annotations

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.errors import AttnCompilerError, shortened


class Fp8RecipeUnused(AttnCompilerError):
    """options["fp8_recipe"] applies to no attention of a graph that has some. modules: their paths; exclude: the recipe's patterns."""

    code = Code.FP8_RECIPE_UNUSED
    message = (
        "options={{'fp8_recipe': ...}}: the recipe applies to none of the {e.count} attentions found ({e.shown}); its patterns "
        "exclude them all: {e.patterns}. Give other patterns, or no recipe; attn_compiler.explain(model, ...) lists the paths"
    )

    modules: tuple[str, ...]
    exclude: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.modules)

    @property
    def shown(self) -> str:
        return shortened(self.modules)

    @property
    def patterns(self) -> str:
        return ", ".join(map(repr, self.exclude))


class Fp8StateMismatch(AttnCompilerError):
    """load_fp8_state_dict was given other histories than the graphs have. problem: the difference."""

    code = Code.FP8_STATE
    message = (
        "load_fp8_state_dict: the histories given are not those of the compiled graphs: {e.problem}. Nothing was loaded. "
        "Histories are there from a model's first compiled call on, for a recipe with DelayedScaling: run the model once before loading. "
        "With strict=False those whose names are on both sides are loaded, if all of them have the shapes that are there"
    )

    problem: str


class Fp8StateInvalid(AttnCompilerError):
    """load_fp8_state_dict was given values that no history can hold. problems: "layers.0/amax holds nan"."""

    code = Code.FP8_STATE
    message = (
        "load_fp8_state_dict: {e.shown}. A history is a float32 tensor of largest magnitudes, which are finite and not negative: one "
        "that is not would make every output wrong for as many steps as it has. Nothing was loaded. Load what fp8_state_dict() gave, or "
        "nothing: delayed scales are found anew in the first steps"
    )

    problems: tuple[str, ...]

    @property
    def shown(self) -> str:
        return shortened(self.problems)


class Fp8StateOutdated(AttnCompilerError):
    """load_fp8_state_dict was given histories of an earlier version, which kept q's, k's and v's apart. given: their names. wanted: the
    names and shapes of the current ones: "'layers.0/amax' (16, 3)"."""

    code = Code.FP8_STATE
    message = (
        "load_fp8_state_dict: the histories given were saved by an earlier version of attn_compiler, which kept q's, k's and v's apart "
        "({e.shown}); wanted is one for all three ({e.shapes}). Join them and load that: {{name: torch.cat([state[name.replace('amax', "
        "'amax_' + x)] for x in 'qkv'], 1) for name in attn_compiler.fp8_state_dict()}}; or load nothing: delayed scales are found anew "
        "in the first steps"
    )

    given: tuple[str, ...]
    wanted: tuple[str, ...]

    @property
    def shown(self) -> str:
        return shortened(tuple(map(repr, self.given)))

    @property
    def shapes(self) -> str:
        return shortened(self.wanted) or "there is none yet, run the model once first"
