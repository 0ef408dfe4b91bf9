"""What one graph tells another is told again, and asked for again, where the passes of one of them, or of both, do not run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from attn_compiler.passes.recovering.borders import Border
from attn_compiler.passes.recovering.reading.borders import GraphRow, Made
from attn_compiler.passes.rewrites import border_records
from attn_compiler.passes.rewrites.refusing import Unkeyed
from attn_compiler.torch_private import frames as torch_frames
from tests.passes.border_masks import attend, causal, padded, window
from tests.passes.rewrites.compiling import compiled
from tests.passes.rewrites.watching import Seen, watched


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTN_COMPILER_CACHE_REWRITES", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def broken(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def function(q: Tensor) -> Tensor:
        mask = make(q)
        torch._dynamo.graph_break()
        return attend(q, mask)

    return function


def _proved(seen: list[Seen]) -> list[str | None]:
    return [site.spec.mask.formula for one in seen for site in one.report.sites]


@pytest.mark.parametrize("make", [causal, padded, window])
def test_masks_keep_their_meaning_over_a_graph_break(make: Callable[[Tensor], Tensor]) -> None:
    q = torch.randn(2, 3, 16, 8)
    first, before = compiled(broken(make), q, lowering="triton")
    second, after = compiled(broken(make), q, lowering="triton")
    assert [one.report.from_cache for one in after] == [True, True]
    assert _proved(after) == _proved(before) != [None]
    torch.testing.assert_close(second, first, rtol=0, atol=0)


def test_a_mask_of_another_meaning_is_another_graph() -> None:
    """The graphs after the break are the same but for what is known of an input."""
    q = torch.randn(2, 3, 16, 8)
    for make in (causal, padded, window):
        out, seen = compiled(broken(make), q, lowering="triton")
        assert [one.report.from_cache for one in seen] == [False, False]
        torch.testing.assert_close(out, broken(make)(q))


def test_what_was_relied_on_is_asked_of_every_call() -> None:
    q = torch.randn(2, 3, 16, 8)
    for times in (1, 2):
        torch._dynamo.reset()
        made = torch.compile(causal, backend="attn_compiler", options={"inner": "eager"})(q)
        run = torch.compile(attend, backend="attn_compiler", options={"inner": "eager", "lowering": "triton"})
        with watched() as seen:
            torch.testing.assert_close(run(q, made), attend(q, made))
            assert [one.report.from_cache for one in seen] == [times == 2]
            assert _proved(seen) == ["k <= q"]
            # Of another tensor nothing is known, and that code does not serve it.
            everything = torch.ones_like(made)
            torch.testing.assert_close(run(q, everything), attend(q, everything))
            assert _proved(seen)[1:] != ["k <= q"]


def test_what_other_meanings_left_no_room_for_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(2, 3, 16, 8)
    with monkeypatch.context() as full:
        full.setattr(torch_frames, "_MOST_MEANINGS", 0)
        _, (_, seen) = compiled(broken(causal), q, lowering="triton")
    assert _proved([seen]) != ["k <= q"]
    assert seen.report.not_kept is not None
    assert "code for other meanings" in seen.report.not_kept
    _, (_, seen) = compiled(broken(causal), q, lowering="triton")
    assert _proved([seen]) == ["k <= q"]
    with monkeypatch.context() as full:
        full.setattr(torch_frames, "_MOST_MEANINGS", 0)
        _, (_, seen) = compiled(broken(causal), q, lowering="triton")
        assert not seen.report.from_cache
    _, (_, seen) = compiled(broken(causal), q, lowering="triton")
    assert seen.report.from_cache
    assert _proved([seen]) == ["k <= q"]


class Stack(nn.Module):
    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.layers, self.writes = nn.ModuleList(nn.Linear(24, 24) for _ in range(4)), writes

    def forward(self, x: Tensor) -> Tensor:
        mask = padded(x[:, None])
        for place, layer in enumerate(self.layers):
            q = layer(x).unflatten(-1, (3, 8)).transpose(1, 2)
            x = x + attend(q, mask).transpose(1, 2).flatten(2)
            if self.writes and place == 1:
                mask[..., 0] = True
        return x


@pytest.mark.in_turns(2)
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("writes", [False, True])
def test_buckets_tell_each_other(writes: bool) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(2, 16, 24), Stack(writes=writes)
    found = []
    for _ in range(2):
        wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.001)
        out, seen = compiled(wrapped, x, inner="aot_eager", lowering="triton")
        torch.testing.assert_close(out, model(x))
        found.append(seen)
    before, after = found
    assert len(before) > 2
    assert [one.report.from_cache for one in after] == [True] * len(before)
    assert _proved(after) == _proved(before)
    assert [one.code for one in after] == [one.code for one in before]
    # What the last buckets know of the mask is what the first one told.
    assert ("k <= q" in str(_proved(after)[-1])) is not writes


def test_what_is_not_among_the_graphs_values_is_not_kept() -> None:
    row = GraphRow(made=[Made(example=torch.ones(1), element=None, loads={}, graph=0)])  # type: ignore[arg-type]
    border = Border(root=object(), row=row, place=0, readers=SimpleNamespace(relied_on={}))  # type: ignore[arg-type]
    with pytest.raises(Unkeyed, match="not found among its values"):
        border_records.record_crossing(border, (), [], [torch.ones(1)])
