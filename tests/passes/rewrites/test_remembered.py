"""When a rewrite is looked up and kept, and when the passes run although it was kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import attn_compiler
from attn_compiler.passes.pipeline import rewriting
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Faster
from tests.passes.rewrites.compiling import attention, compiled, is_again, masked, qkv, why_not


def test_what_is_kept_from_call_to_call_is_not_kept_in_files() -> None:
    recipe = attn_compiler.Fp8Recipe(scaling=attn_compiler.DelayedScaling(amax_history_len=4))
    why = why_not(attention, *qkv(2, 3, 64, 32, dtype=torch.bfloat16), fp8_recipe=recipe, lowering="reference_fp8")
    assert why == "the rewritten graph holds tensors that are kept from call to call"


def test_what_compiles_kernels_starts_where_nothing_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    made = rewriting.Work
    monkeypatch.setattr(
        rewriting, "Work", lambda **given: made(**{**given, "start": lambda: started.append("workers")})
    )
    assert [(is_again(masked, *qkv()), len(started)) for _ in range(2)] == [(False, 1), (True, 1)]
    assert compiled(torch.sin, torch.ones(3))
    assert started == ["workers"]


def test_what_would_be_faster_is_kept_with_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_compiler.passes.writing import select

    found = Faster(lowering="cudnn", distribution="x", install="pip install x", speed=1.5, why="measured", since="2026")
    with monkeypatch.context() as without_the_package:
        without_the_package.setattr(select, "faster", lambda *_: found)
        assert why_not(masked, *qkv()) is None
    _, (seen,) = compiled(masked, *qkv())
    assert seen.report.from_cache
    assert [site.faster for site in seen.report.sites] == [found]


def test_a_fault_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_compiler.passes.writing import lower

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(lower, "_operands", broken)
    with pytest.warns(attn_compiler.AttnCompilerWarning):
        why = why_not(masked, *qkv(), lowering="math")
    assert why == "something failed, and may not fail again"


def test_a_mask_that_could_not_be_read_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process warns again, or reads it."""
    from attn_compiler.passes.recovering import meaning

    def broken(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as full:
        full.setattr(meaning, "of", broken)
        with pytest.warns(attn_compiler.AttnCompilerWarning, match="could not read the mask"):
            why = why_not(masked, *qkv())
    assert why == "something failed, and may not fail again"
    _, (seen,) = compiled(masked, *qkv())
    assert [site.spec.mask.formula for site in seen.report.sites] == ["k <= q"]


def test_a_choice_that_could_not_be_built_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk may be full, or the GPU: the next process tries again."""
    from attn_compiler.lowerings import by_name
    from attn_compiler.reasons.decisions import Reason

    reason = Reason(code=Code.MEMORY, rule="there is room", observed="there is none")
    monkeypatch.setattr(type(by_name("reference")), "cannot_build", lambda *_: [reason])
    why = why_not(attention, *qkv(), lowerings=["reference", "math"])
    assert why == "reference could not be built, and may be built another time"


def test_what_this_process_can_not_build_is_not_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries of the same versions may be broken here, or their compiler may be missing."""
    from attn_compiler.lowerings import by_name
    from attn_compiler.reasons.decisions import Reason

    choice = {"lowerings": ["reference", "math"]}
    assert not is_again(attention, *qkv(), **choice)
    asked: list[Any] = []
    reference = type(by_name("reference"))
    reason = Reason(code=Code.LIBRARY_MISSING, rule="its library loads", observed="it does not")
    monkeypatch.setattr("attn_compiler.lowerings.homes.BUILT", {"reference"})
    monkeypatch.setattr(reference, "cannot_build", lambda _, *given: asked.append(given) or [])
    # Kernels are built while the graph is compiled, and not by the first call.
    assert is_again(attention, *qkv(), **choice)
    assert len(asked) == 1
    monkeypatch.setattr(reference, "cannot_build", lambda *_: [reason])
    _, (seen,) = compiled(attention, *qkv(), **choice)
    assert not seen.report.from_cache
    assert [site.decision.lowering for site in seen.report.sites] == ["math"]
    monkeypatch.undo()


def test_dumps_and_checks_of_the_first_call_want_the_passes(tmp_path: Path) -> None:
    assert not is_again(attention, *qkv())
    assert not is_again(attention, *qkv(), verify=True)
    assert not is_again(attention, *qkv(), dump_dir=str(tmp_path / "dumps"))
    assert is_again(attention, *qkv())


def test_what_those_made_is_kept_all_the_same() -> None:
    assert not is_again(attention, *qkv(), verify=True)
    assert is_again(attention, *qkv())


def _foreign(change: Callable[[dict[str, Any]], Any], folder: Path) -> None:
    """A file whose digest is right."""
    from attn_compiler.torch_private.store import Store

    (path,) = folder.iterdir()
    held = json.loads(path.read_bytes())
    change(held["rewrite"])
    Store(root=folder.parents[1]).put(held["key"], held["rewrite"])


_FOREIGN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another function": lambda kept: kept["edits"][0]["new"][0].update(op="call_function", target="function:os.system"),
    "a private method": lambda kept: kept["edits"][0]["new"][0].update(op="call_method", target="__reduce__"),
    "a node out of order": lambda kept: kept["edits"][0]["order"].reverse(),
    "a node that is not there": lambda kept: kept["edits"][0]["new"][0].update(given=["tuple", ["node", 10_000]]),
    "an unknown field": lambda kept: kept["edits"][0].update(more=1),
    "an unknown kind": lambda kept: kept.update(kind="Report"),
    "an input that is not there": lambda kept: kept["crossing"].update(relied_on=[10_000]),
    "an unknown lowering": lambda kept: kept["report"]["sites"][0]["decision"].update(lowering="none"),
    "no graph": lambda kept: kept["edits"][0].update(graph=7),
    "another name": lambda kept: kept["edits"][0]["new"][0].update(name="softmax"),
}


@pytest.mark.parametrize("change", _FOREIGN)
def test_a_file_that_does_not_fit_is_missing_and_the_graph_as_it_came(change: str, folder: Path) -> None:
    inputs = qkv()
    out, (first,) = compiled(masked, *inputs, lowering="math")
    _foreign(_FOREIGN[change], folder)
    again, (second,) = compiled(masked, *inputs, lowering="math")
    assert second.ran
    assert not second.report.from_cache
    # Nodes of a graph that was made again what it was have other names.
    assert [node["target"] for node in second.nodes] == [node["target"] for node in first.nodes]
    torch.testing.assert_close(again, out, rtol=0, atol=0)


def test_a_failure_after_a_file_that_does_not_fit_leaves_the_graph_as_it_came(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attn_compiler.passes.writing import summary

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("no report")

    inputs = qkv()
    compiled(masked, *inputs, lowering="math")
    _foreign(_FOREIGN["a node out of order"], folder)
    # Every graph is rewritten by then.
    monkeypatch.setattr(summary, "report", broken)
    with pytest.warns(attn_compiler.AttnCompilerWarning, match="no report"):
        out, (seen,) = compiled(masked, *inputs, lowering="math")
    assert F.scaled_dot_product_attention in [node["target"] for node in seen.nodes]
    torch.testing.assert_close(out, masked(*inputs), rtol=0, atol=0)


def test_a_failing_key_is_told_and_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("no key")

    monkeypatch.setattr("attn_compiler.passes.rewrites.key.make_key", broken)
    why = why_not(attention, *qkv())
    assert why is not None
    assert why.startswith("keeping it failed: ZeroDivisionError: no key")
    assert "a rewrite is not kept for the next process: ZeroDivisionError: no key" in caplog.text
