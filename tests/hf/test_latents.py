"""Every family of transformers that caches a latent decodes over it: the tokens of eager decoding, and its scores up to rounding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import attn_compiler
from attn_compiler.reporting.facts import SiteReport
from tests.hf.latents import LATENTS, NOPE, RANK, Decoding, decoded
from tests.hf.packages import Unavailable
from tests.thinned import further, in_full

OPTIONS: dict[str, Any] = {"inner": "eager", "strict": True, "cache_rewrites": False}


@pytest.fixture(autouse=True)
def _from_the_start() -> Iterator[None]:
    torch._dynamo.reset()
    attn_compiler.reset()
    yield
    torch._dynamo.reset()


def _sites() -> list[SiteReport]:
    return [site for report in attn_compiler.reports() for site in report.sites]


def _both(family: str, *, static: bool, **options: Any) -> tuple[Decoding, Decoding]:
    try:
        config, model = LATENTS[family].build()
    except Unavailable as missing:
        pytest.skip(str(missing))
    # With a static cache each step's mask has another length, which is compiled for itself: the second reads what the first wrote.
    # With a growing one the second is compiled for all further lengths.
    steps = 2 if static else 3
    expected = decoded(model, model, config, static=static, steps=steps)
    step = torch.compile(
        model, backend="attn_compiler", dynamic=None if not static else False, options={**OPTIONS, **options}
    )
    return decoded(model, step, config, static=static, steps=steps), expected


def _check(family: str, *, static: bool, **options: Any) -> None:
    found, expected = _both(family, static=static, **options)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-4, atol=1e-4 * expected.scores.abs().max().item())
    assert _sites()
    for site in _sites():
        assert site.decision.lowering == "absorbed", site.decision
        latent = site.spec.latent
        assert latent is not None
        assert (latent.rank, latent.nope) == (RANK, NOPE)
    assert not [miss for report in attn_compiler.reports() for miss in report.misses]


#: those whose attention is written in a way of its own; deepseek_v3 has tests of its own
_OWN_WAYS = ("minicpm3", "mistral_large4", "longcat_flash", "kimi_linear", "hy_v4")
WHOLE = [name for name, family in LATENTS.items() if not family.is_cut]


@pytest.mark.parametrize("family", further(WHOLE, daily=("deepseek_v3", "kimi_linear")))
def test_a_static_cache(family: str) -> None:
    _check(family, static=True, verify=True)
    checks = [str(one) for one in attn_compiler.verifications()]
    assert any("output verified" in check for check in checks)
    assert not any("output not verified" in check for check in checks), checks


@pytest.mark.further
def test_k_and_v_that_another_graph_made_are_read_as_they_are() -> None:
    """The indexer of GLM-5-Next breaks the graph between what makes k and v, and the attention."""
    found, expected = _both("glm5_next", static=True)
    assert torch.equal(found.tokens, expected.tokens)
    assert [site.spec.latent for site in _sites()] == [None] * len(_sites())


@pytest.mark.parametrize(
    "family", [*further(_OWN_WAYS, daily=_OWN_WAYS[:2]), *in_full((x for x in WHOLE if x not in _OWN_WAYS), daily=())]
)
def test_a_growing_cache(family: str) -> None:
    _check(family, static=False)


def test_a_growing_cache_is_compiled_for_its_first_length_and_for_all_others() -> None:
    _check("deepseek_v3", static=False)
    assert len(attn_compiler.reports()) == 2


def test_written_out_attention_is_found_too() -> None:
    family = LATENTS["deepseek_v3"]
    config, model = family.build()
    model.set_attn_implementation("eager")
    expected = decoded(model, model, config, static=True)
    found = decoded(
        model, torch.compile(model, backend="attn_compiler", options={**OPTIONS, "verify": True}), config, static=True
    )
    assert torch.equal(found.tokens, expected.tokens)
    assert {site.decision.lowering for site in _sites()} == {"absorbed"}
    assert all(site.spec.decomposed for site in _sites())


def test_a_prompt_is_left_as_it_is() -> None:
    config, model = LATENTS["deepseek_v3"].build()
    compiled = torch.compile(model, backend="attn_compiler", options=OPTIONS)
    expected = decoded(model, model, config, static=True, steps=0)
    found = decoded(compiled, model, config, static=True, steps=0)
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-4, atol=1e-4 * expected.scores.abs().max().item())
    (site,) = _sites()
    assert site.spec.latent is not None
    refused = {refusal.lowering: refusal.reasons for refusal in site.decision.refusals}
    assert "fewer than 14: from there on" in refused["absorbed"][0].rule
    assert refused["absorbed"][0].observed == "seqlen_q 19"
