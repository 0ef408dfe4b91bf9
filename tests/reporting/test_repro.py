"""Programs of one site: each is compiled here, and one runs in a process of its own."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attn_compiler
from attn_compiler.reasons.errors import AttnCompilerWarning
from attn_compiler.reporting.facts import SiteReport
from attn_compiler.reporting.publishing import reset
from attn_compiler.spec import masks
from attn_compiler.spec.fp8_recipe import CurrentScaling, Fp8Recipe
from tests.reporting.making import HOSTILE, SITE

B, S = 2, 40


def _heads(count: int, *, grad: bool = False) -> Tensor:
    return torch.randn(B, S, count, 16).transpose(1, 2).detach().requires_grad_(grad)


def _padded(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    at = torch.arange(S)
    mask = (at[:, None] >= at)[None, None] & (attention_mask[:, None, None, :] != 0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def _capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(S)
    scores = torch.tanh(q @ k.mT * 0.25 / 50.0) * 50.0
    far = (at[:, None] < at) | (at[:, None] - at > 8)
    return scores.masked_fill(far, -torch.inf).softmax(-1) @ v


def _sunk(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = torch.cat((q @ k.mT * 0.25, sinks[None, :, None, None].expand(B, -1, S, 1)), -1)
    return scores.softmax(-1)[..., :-1] @ v


def _flagged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25)


def _given(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "flag": (_flagged, (_heads(4), _heads(4), _heads(4))),
    "gradients": (_flagged, (_heads(4, grad=True), _heads(4), _heads(4, grad=True))),
    "padding, grouped": (_padded, (_heads(4), _heads(2), _heads(2), torch.ones(B, S, dtype=torch.int64))),
    "softcap, window": (_capped, (_heads(4), _heads(4), _heads(4))),
    "sinks": (_sunk, (_heads(4), _heads(4), _heads(4), torch.randn(4))),
    "dense": (_given, (_heads(4), _heads(4), _heads(4), torch.rand(B, 1, S, S) < 0.5)),
    "numbers": (_given, (_heads(4), _heads(4), _heads(4), torch.randn(B, 1, S, S))),
    "bias": (_given, (_heads(4), _heads(4), _heads(4), torch.randn(1, 4, S, S, requires_grad=True))),
}


def _site(
    function: Callable[..., Any], *given: Tensor, dynamic: bool | None = None, fp8: Any = None, **named: Tensor
) -> SiteReport:
    torch._dynamo.reset()
    reset()
    options = {"inner": "eager", "check_invariants": True, "fp8_recipe": fp8}
    torch.compile(function, backend="attn_compiler", options=options, dynamic=dynamic)(*given, **named)
    (site,) = attn_compiler.reports()[-1].sites
    return site


@pytest.mark.parametrize("case", CASES)
def test_a_program_gives_the_same_spec(case: str) -> None:
    function, given = CASES[case]
    site = _site(function, *given)
    program: dict[str, Any] = {"__name__": "repro"}
    exec(site.repro(), program)
    assert program["SPEC"] == site.spec
    assert [x.stride() for x in list(program["INPUTS"].values())[:3]] == [x.stride() for x in given[:3]]
    found = _site(program["attention"], **program["INPUTS"])
    assert program["known"](found.spec) == program["known"](site.spec)
    assert found.decision.lowering == site.decision.lowering


def test_a_program_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    function, given = CASES["padding, grouped"]
    file = tmp_path / "repro.py"
    file.write_text(_site(function, *given).repro())
    run = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == ["eager", "inductor", "attn_compiler"]
    assert "the same spec: True" in lines
    assert "OPTIONS = {'inner': 'eager'}" in file.read_text()


def test_symbolic_sizes_are_numbers_and_said_to_be() -> None:
    text = _site(_flagged, _heads(4), _heads(4), _heads(4), dynamic=True).repro()
    assert "Not as in the model: a symbolic size is a number." in text
    program: dict[str, Any] = {"__name__": "repro"}
    exec(text, program)
    assert program["attention"](**program["INPUTS"]).shape == program["INPUTS"]["q"].shape


def test_a_recipe_of_fp8_goes_with_the_site() -> None:
    recipe = Fp8Recipe(scaling=CurrentScaling(granularity="head"), exclude=("*.other",))
    given = [_heads(4).bfloat16() for _ in "qkv"]
    with pytest.warns(AttnCompilerWarning, match="excludes none"):
        site = _site(_flagged, *given, fp8=recipe)
    program: dict[str, Any] = {"__name__": "repro"}
    exec(site.repro(), program)
    assert program["OPTIONS"] == {"inner": "eager", "fp8_recipe": recipe.for_site()}
    assert "Not as in the model" not in site.repro()
    found = _site(program["attention"], **program["INPUTS"], fp8=program["OPTIONS"]["fp8_recipe"])
    assert program["known"](found.spec) == program["known"](site.spec)
    left_out = dataclasses.replace(site, spec=dataclasses.replace(site.spec, fp8=None))
    exec(left_out.repro(), program)
    assert program["OPTIONS"] == {"inner": "eager"}, "a pattern excluded the site"


def test_ranks_that_share_a_sequence_are_said_to_be_left_out() -> None:
    text = dataclasses.replace(SITE, options='{"context_parallel": {"method": "ring"}, "inner": "eager"}').repro()
    assert "no rank shares the sequence" in text
    assert "OPTIONS = {'inner': 'eager'}" in text


@pytest.mark.parametrize(
    ("length", "number"),
    [
        ("Max(1, s0 - 20)", 1),
        ("FloorDiv(s0, 300)", 1),
        ("CleanDiv(s0 + 4, 2)", 10),
        ("((s0 + 1)//2)", 8),
        ("s1 - s0", 8),
        ("s0 - s1", 8),
        ("TruncToInt(1.5*ToFloat(s0))", 24),
        ("CeilToInt(IntTrueDiv(s0, 3))", 6),
    ],
)
def test_functions_of_sizes_are_code(length: str, number: int) -> None:
    spec = dataclasses.replace(SITE.spec, device="cpu", mask=masks.MaskSpec(dense=None))
    q, k = (
        dataclasses.replace(
            x, shape=("u3", heads, length, 64), strides=(f"{64 * heads}*Max(1, {length})", 64, 64 * heads, 1)
        )
        for x, heads in ((spec.q, 8), (spec.k, 2))
    )
    text = dataclasses.replace(SITE, spec=dataclasses.replace(spec, q=q, k=k, v=k)).repro()
    program: dict[str, Any] = {"__name__": "repro"}
    exec(text, program)
    assert program["INPUTS"]["q"].shape == (program["u3"], 8, number, 64)
    assert program["attention"](**program["INPUTS"]).shape == (program["u3"], 8, number, 64)


def test_names_that_try_to_break_out_stay_text() -> None:
    site = dataclasses.replace(SITE, modules=('"""\nraise SystemExit\n"""' + HOSTILE + "\\",))
    compile(site.repro(), "repro.py", "exec")
    assert "\nraise SystemExit" not in site.repro()
