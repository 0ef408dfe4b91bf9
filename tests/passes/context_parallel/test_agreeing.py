"""A rewritten graph has to have the attentions that were written, on all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from attn_compiler.passes.matching import match
from attn_compiler.passes.recovering import recover
from attn_compiler.reasons.errors import ContextParallelUnsupported, PassFailed
from tests.passes.context_parallel.compiled import BATCH, LENGTH, WIDTH, compile_and_run


def _second(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, change: Any) -> None:
    """What a step gives for the rewritten graph is changed."""
    run, looks = getattr(module, name), []

    def changed(*given: Any) -> Any:
        looks.append(given)
        found = run(*given)
        return change(found) if len(looks) == 2 else found

    monkeypatch.setattr(module, name, changed)


@pytest.mark.parametrize(
    ("module", "name"), [(match, "find_sites"), (recover, "recover_specs")], ids=["match", "recover"]
)
def test_an_attention_that_is_not_understood_again_is_an_error(
    module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _second(monkeypatch, module, name, lambda found: type(found)(misses=found.misses))
    with pytest.raises(ContextParallelUnsupported, match="each rewritten attention is understood again") as caught:
        compile_and_run()
    assert "0 of 1" in str(caught.value)


def test_the_other_ranks_are_told_of_what_fails_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def fail(_: Any) -> Any:
        raise MemoryError("full")

    _second(monkeypatch, match, "find_sites", fail)
    with pytest.raises(PassFailed, match="full") as caught:
        compile_and_run(said=said)
    assert caught.value.pass_name == "agree"
    assert any("error: MemoryError: full" in text for text in said)


def test_what_is_rewritten_is_run() -> None:
    assert compile_and_run().shape == (BATCH, LENGTH, WIDTH)
