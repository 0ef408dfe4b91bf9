"""The exchange of a halo, with ranks that are simulated in one process: the values of neighbours, and the transpose for gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from attn_compiler.context_parallel import halo_ops as torch_halos
from attn_compiler.context_parallel.halo import Halo
from attn_compiler.context_parallel.layout import Layout

B, H, D = 2, 3, 2


class _World:
    """Every rank runs twice: first to say what it sends, then to get what the others said."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0
        self.said: list[tuple[torch.Tensor, list[int]]] = []

    def exchanged(self, x: torch.Tensor, sent: list[int], received: list[int], group: str) -> torch.Tensor:
        if len(self.said) < self.size:
            self.said.append((x.clone(), sent))
            return x.new_zeros(sum(received))
        parts = [x.split(counts)[self.rank] for x, counts in self.said]
        assert [part.numel() for part in parts] == received
        return torch.cat(parts)

    def run(self, op: Any, given: list[torch.Tensor], *args: Any) -> list[torch.Tensor]:
        self.said.clear()
        found = []
        for _ in range(2):
            found = []
            for rank in range(self.size):
                self.rank = rank
                found.append(op(given[rank], *args))
        return found


@st.composite
def _drawn(draw: st.DrawFn) -> tuple[Layout, Halo]:
    layout = Layout(size=draw(st.integers(2, 4)), balanced=draw(st.booleans()))
    chunk = draw(st.integers(1, 3))
    widest = min(5, (layout.chunks - 1) * chunk)
    return layout, Halo(left=draw(st.integers(0, widest)), right=draw(st.integers(1, widest)), chunk=chunk)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=_drawn())
def test_halos_hold_what_neighbours_have_and_gradients_go_back(
    monkeypatch: pytest.MonkeyPatch, drawn: tuple[Layout, Halo]
) -> None:
    layout, halo = drawn
    world = _World(layout.size)
    monkeypatch.setattr(torch_halos, "rank_of", lambda group: world.rank)
    monkeypatch.setattr(torch_halos, "sent_and_received", world.exchanged)
    args = (halo.left, halo.right, halo.chunk, layout.size, layout.balanced, "g")
    chunks = torch.randn(layout.chunks, B, H, halo.chunk, D, dtype=torch.float64)
    ends = torch.cat((chunks[..., halo.chunk - halo.tail :, :], chunks[..., : halo.head, :]), 3)
    own = [torch.stack([ends[i] for i in layout.chunks_of(rank)], 2) for rank in range(layout.size)]
    found = world.run(torch_halos._halo, own, *args)
    around = torch.nn.functional.pad(torch.cat(tuple(chunks), 2), (0, 0, halo.left, halo.right))
    for rank in range(layout.size):
        for at, i in enumerate(layout.chunks_of(rank)):
            start = i * halo.chunk
            left = around[:, :, start : start + halo.left]
            right = around[:, :, start + halo.left + halo.chunk :][:, :, : halo.right]
            assert found[rank][:, :, at].equal(torch.cat((left, right), 2))
    grads = [torch.randn_like(x) for x in found]
    back = world.run(torch_halos._halo_gradient, grads, *args)
    there = sum((x * g).sum() for x, g in zip(found, grads, strict=True))
    here = sum((x * g).sum() for x, g in zip(own, back, strict=True))
    torch.testing.assert_close(there, here)


def test_the_op_knows_its_shapes_without_running() -> None:
    ends = torch.empty(B, H, 2, 5, D, device="meta")
    assert torch_halos.halo(ends, 9, 2, 3, 4, True, "g").shape == (B, H, 2, 11, D)
    grad = torch.empty(B, H, 2, 11, D, device="meta")
    assert torch_halos.halo_gradient(grad, 9, 2, 3, 4, True, "g").shape == (B, H, 2, 5, D)
