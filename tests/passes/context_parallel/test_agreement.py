"""A graph is rewritten on all ranks or on none, and where ranks wait for each other in it they meet before each call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attn_compiler import ContextParallel
from attn_compiler.context_parallel.lockstep import Meeting
from attn_compiler.options.options import Options
from attn_compiler.passes.context_parallel import rank_facts
from attn_compiler.passes.context_parallel.agreement import Said, together
from attn_compiler.passes.context_parallel.refusing import CannotShard
from attn_compiler.passes.graph import unit
from attn_compiler.passes.graph.unit import Unit, UnitPlace
from attn_compiler.reasons.errors import ContextParallelUnsupported
from attn_compiler.torch_private import rank_sync, tracing as torch_tracing
from attn_compiler.torch_private.rank_sync import TOLD, RanksDisagree
from tests.meshes import fake_mesh
from tests.passes.compiling import captured


def _together(
    monkeypatch: pytest.MonkeyPatch,
    rewrite: Callable[[], Said],
    *,
    differs: str | None = None,
    beside: str | None = None,
) -> tuple[list[str], tuple[Meeting, ...]]:
    """What was said, and where ranks meet. differs: what the other rank does otherwise."""
    said: list[str] = []

    def agree(group: str, subject: str, text: str, *, seconds: float) -> None:
        said.append(text)
        if differs is not None:
            raise RanksDisagree(differs)

    monkeypatch.setattr(rank_sync, "agree", agree)
    gm, mirror = captured(lambda x: x.cos(), torch.randn(2, 8, 4))
    mode = torch_tracing.fake_mode_of_values(unit.examples(gm))
    assert mode is not None
    with fake_mesh(2) as mesh:
        cp = ContextParallel(mesh)
        found = Unit.of(gm, Options(context_parallel=cp), UnitPlace(name="", mode=mode))
        call = rank_facts.of_call(gm.graph)
        meetings = together(found, mirror, cp, [] if beside is None else [beside], call, rewrite)
    return said, meetings


def _fails(error: Exception) -> Callable[[], Said]:
    def rewrite() -> Said:
        raise error

    return rewrite


def test_what_was_found_and_the_options_are_compared_and_the_call_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    (text,), _ = _together(monkeypatch, lambda: Said(text="1 attentions", exchanges=True))
    compared, _, told = text.partition(TOLD)
    assert compared.startswith("compiles\n1 attentions\n")
    assert "load_balance: 'head_tail'" in compared
    assert "l_x_: torch.float32 (2, 8, 4)" in told


def test_ranks_meet_by_what_all_of_them_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        _together(monkeypatch, lambda text=text: Said(text=text, exchanges=True))[1]  # type: ignore[misc]
        for text in ("1 attentions", "1 attentions", "2 attentions")
    ]
    codes = [meetings[0].code for meetings in found]
    assert codes[0] == codes[1] != codes[2]


def test_ranks_with_other_heads_meet_by_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    _, meetings = _together(monkeypatch, lambda: Said(text="a", exchanges=True), beside="7")
    assert [one.group for one in meetings][1] == "7"
    assert meetings[1].code == "a share of the heads"


def test_a_graph_in_which_no_rank_waits_has_no_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _together(monkeypatch, lambda: Said(text="0 attentions", exchanges=False))[1] == ()


@pytest.mark.parametrize(
    ("error", "raised"),
    [(CannotShard("a rule", "a mask"), ContextParallelUnsupported), (MemoryError("full"), MemoryError)],
)
def test_an_error_is_told_and_then_raised(
    error: Exception, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(raised):
        _together(monkeypatch, _fails(error))


def test_what_another_rank_does_is_an_error_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ContextParallelUnsupported, match="rank 1: runs graph 0/0"):
        _together(monkeypatch, lambda: Said(text="a", exchanges=True), differs="rank 1: runs graph 0/0")


def test_shapes_are_told_of_any_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.is_grad_enabled()
    (text,), _ = _together(monkeypatch, lambda: Said(text="a", exchanges=True))
    assert "with gradients: True" in text
