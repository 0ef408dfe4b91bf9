"""Where a recipe applies, end to end: what the report says of each site, and what is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attn_compiler
from attn_compiler import CurrentScaling, DelayedScaling, Fp8Recipe
from attn_compiler.lowerings.base import FP8
from attn_compiler.lowerings.choice import priorities
from attn_compiler.reasons.errors import AttnCompilerWarning, InvalidOption
from attn_compiler.reasons.fp8_errors import Fp8RecipeUnused
from attn_compiler.spec.target import Target
from tests.lowerings.specs import make_spec
from tests.passes.compiling import Compiled, compiled


class Attention(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(nn.Identity()), Attention(nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def run(
    recipe: Any, *, dtype: torch.dtype = torch.bfloat16, model: nn.Module | None = None, **options: Any
) -> Compiled:
    chosen = options or {"lowerings": ["reference_fp8", "math"]}
    function = compiled(model or Model(), fp8_recipe=recipe, **chosen)
    function(torch.randn(1, 2, 64, 32).to(dtype))
    return function


def test_a_recipe_applies_to_every_site() -> None:
    site = run(Fp8Recipe(smooth_k=True)).site
    assert site.modules == ("first", "second")
    assert site.spec.fp8 == Fp8Recipe(smooth_k=True)
    assert site.decision.lowering == "reference_fp8"
    assert site.notes == ("FP8 forward: e4m3, current scaling per block of 128, smooth_k; backward in bfloat16",)


def test_without_one_nothing_is_different() -> None:
    site = run(None).site
    assert site.spec.fp8 is None
    assert site.decision.lowering == "math"


def test_verification_leaves_it_out_and_says_so() -> None:
    run(Fp8Recipe(), verify=True, lowerings=["reference_fp8"])
    (one, other) = (found for found in attn_compiler.verifications() if found.subject == "output")
    assert one.skipped == other.skipped == "FP8 rounds more than the rule allows for"


def test_an_excluded_path_keeps_its_precision_and_says_so() -> None:
    report = run(Fp8Recipe(exclude=("fir*",))).report
    found = {site.modules: site for site in report.sites}
    first, second = found[("first",)], found[("second",)]
    assert (first.decision.lowering, second.decision.lowering) == ("math", "reference_fp8")
    assert first.notes == ("fp8_recipe: excluded by the pattern 'fir*'",)
    assert second.spec.fp8 == Fp8Recipe()


def test_a_recipe_that_applies_to_no_site_is_an_error() -> None:
    with pytest.raises(Fp8RecipeUnused, match=r"none of the 2 attentions.*first, second.*'\*'"):
        run(Fp8Recipe(exclude=("*",)))


class Broken(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


@pytest.mark.parametrize("excluded", ["first", "second"])
def test_of_a_model_with_graph_breaks_a_whole_graph_may_be_excluded(excluded: str) -> None:
    reports = run(Fp8Recipe(exclude=(excluded,)), model=Broken()).reports
    found = {site.modules: site.decision.lowering for report in reports for site in report.sites}
    wanted = {name: "math" if name == excluded else "reference_fp8" for name in ("first", "second")}
    assert found == {(name,): lowering for name, lowering in wanted.items()}


def test_a_pattern_that_excludes_nothing_is_warned_of() -> None:
    """Else a name that is spelled wrong would leave an attention in FP8 without a word."""
    with pytest.warns(
        AttnCompilerWarning, match=r"the pattern 'layer\.0' excludes none of the attentions.*first, second"
    ):
        run(Fp8Recipe(exclude=("fir*", "layer.0")))


def test_patterns_that_exclude_something_are_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    run(Fp8Recipe(exclude=("fir*", "first")))
    run(None, dtype=torch.float32)
    run(Fp8Recipe(exclude=("second",)), model=Broken())
    assert not [warning for warning in recwarn if issubclass(warning.category, AttnCompilerWarning)]


def test_a_recipe_is_no_error_where_there_is_no_attention() -> None:
    found = compiled(torch.sin, fp8_recipe=Fp8Recipe())(torch.ones(3))
    torch.testing.assert_close(found, torch.ones(3).sin())


def test_no_recipe_at_all_is_an_error() -> None:
    with pytest.raises(InvalidOption, match="'fp8_recipe' takes a Fp8Recipe or None"):
        run("current")


def test_a_model_in_float32_is_told_to_become_one_in_bfloat16() -> None:
    with pytest.warns(
        AttnCompilerWarning, match=r"the attention runs in fp32, FP8 is ignored; call model\.bfloat16\(\)"
    ):
        (refusal, *_) = run(Fp8Recipe(), dtype=torch.float32).site.decision.refusals
    assert refusal.lowering == "reference_fp8"
    assert any(reason.remedy and "call model.bfloat16()" in reason.remedy for reason in refusal.reasons)


def test_a_machine_without_kernels_in_fp8_is_warned_of() -> None:
    with pytest.warns(AttnCompilerWarning, match=r"no kernel in FP8 serves Triton's interpreter: .* runs in bfloat16"):
        assert run(Fp8Recipe(), lowerings=["hopper_fp8", "math"]).site.decision.lowering == "math"


def test_it_can_be_asked_before_anything_is_compiled() -> None:
    """`explain` alone knows of no recipe. With one it leaves no history behind."""
    options = {"fp8_recipe": Fp8Recipe(scaling=DelayedScaling()), "lowerings": ["reference_fp8", "math"]}
    ask, x = attn_compiler.explainer(options=options), torch.randn(1, 2, 64, 32)
    before = attn_compiler.fp8_state_dict().keys()
    assert "call model.bfloat16()" in ask(Model(), x).details()
    assert "delayed scaling per tensor" in ask(Model(), x.bfloat16()).details()
    assert attn_compiler.fp8_state_dict().keys() == before


@pytest.mark.parametrize("scaling", [CurrentScaling(), CurrentScaling(granularity="tensor"), DelayedScaling()])
def test_an_empty_batch_keeps_its_precision(scaling: Any) -> None:
    function = compiled(Model(), fp8_recipe=Fp8Recipe(scaling=scaling), lowering="reference_fp8")
    assert function(torch.ones(0, 2, 64, 32).bfloat16()).shape == (0, 2, 64, 32)
    assert {site.decision.lowering for site in function.report.sites} == {"untouched"}


def test_lowerings_that_know_no_fp8_say_that_it_was_ignored() -> None:
    site = run(Fp8Recipe(), lowering="math").site
    assert site.decision.lowering == "math"
    assert site.notes == ("fp8_recipe: ignored, the lowerings asked for (math) run in no FP8",)


def test_delayed_scaling_needs_a_place_for_its_history() -> None:
    """A body that several calls share has none of its own for each."""

    def shared(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    def nested(x: Tensor) -> Tensor:
        return checkpoint(shared, x, use_reentrant=False)

    class Nested(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(nested, x, use_reentrant=False)

    recipe = Fp8Recipe(scaling=DelayedScaling())
    function = compiled(Nested(), fp8_recipe=recipe, lowerings=["reference_fp8", "math"])
    function(torch.randn(1, 2, 64, 32).bfloat16().requires_grad_())
    (note,) = function.site.notes
    assert note.startswith("fp8_recipe: ignored, no history can be kept")
    assert function.site.decision.lowering == "math"


def test_only_a_recipe_makes_fp8_a_choice() -> None:
    spec, target = make_spec(seqlen_q=4096, seqlen_kv=4096), Target.fake()
    assert not set(priorities.order(spec, target)) & set(FP8)
