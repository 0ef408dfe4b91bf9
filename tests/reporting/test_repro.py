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
from attn_compiler.reporting.facts import SiteReport
from attn_compiler.reporting.publishing import reset
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


def _site(function: Callable[..., Any], *given: Tensor, dynamic: bool | None = None, **named: Tensor) -> SiteReport:
    torch._dynamo.reset()
    reset()
    options = {"inner": "eager", "check_invariants": True}
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


def test_names_that_try_to_break_out_stay_text() -> None:
    site = dataclasses.replace(SITE, modules=('"""\nraise SystemExit\n"""' + HOSTILE + "\\",))
    compile(site.repro(), "repro.py", "exec")
    assert "\nraise SystemExit" not in site.repro()
