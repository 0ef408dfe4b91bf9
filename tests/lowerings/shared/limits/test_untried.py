"""What a release that was not tried costs: a lowering whose kernel did not compile with it, on that machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attn_compiler import lowerings
from attn_compiler.lowerings.shared.limits import untried
from attn_compiler.options.options import Options
from attn_compiler.passes.writing.select import decide
from attn_compiler.reasons.codes import Code
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import inductor as torch_inductor
from tests.lowerings.specs import CAUSAL, make_spec

NEWER, TRIED = Target.fake(triton="3.10.0", torch="2.16.0"), Target.fake(triton="3.9.0", torch="2.15.0")
SPEC = make_spec(mask=CAUSAL)


@pytest.fixture(autouse=True)
def _disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(torch_inductor, "cache_folder", lambda: tmp_path)
    untried._known.cache_clear()
    yield
    untried._known.cache_clear()


def test_the_lowering_is_refused_on_that_machine_and_the_next_one_serves() -> None:
    options = Options(lowerings=("triton", "math"))
    assert decide(SPEC, NEWER, options).lowering == "triton"
    untried.note("triton", NEWER, "CompilationError: no _replace")
    found = decide(SPEC, NEWER, options)
    assert found.lowering == "math"
    (reason,) = found.refusals[0].reasons
    assert reason.code is Code.NOT_COMPILED
    assert "triton 3.10 was not tried" in reason.rule
    assert reason.observed == "CompilationError: no _replace"
    assert decide(SPEC, TRIED, options).lowering == "triton"
    assert lowerings.cannot_build("math", SPEC, NEWER) == []


def test_the_next_process_knows(tmp_path: Path) -> None:
    untried.note("triton", NEWER, "no")
    untried.note("decode", NEWER, "nor this")
    untried._known.cache_clear()
    assert [reason.observed for reason in untried.reasons("triton", NEWER)] == ["no"]
    assert [reason.observed for reason in untried.reasons("decode", NEWER)] == ["nor this"]
    assert len(list(tmp_path.rglob("*.json"))) == 1


def test_with_releases_that_were_tried_nothing_is_kept(tmp_path: Path) -> None:
    untried.note("triton", TRIED, "no")
    assert untried.reasons("triton", TRIED) == []
    assert list(tmp_path.rglob("*")) == []


def test_a_folder_that_can_not_be_made_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise OSError("read-only")

    monkeypatch.setattr(torch_inductor, "cache_folder", fail)
    untried.note("triton", NEWER, "no")
    assert untried.reasons("triton", NEWER) == []
