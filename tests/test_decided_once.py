"""What is decided is decided once: data may change as it likes, an option may not change unseen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import attn_compiler
from attn_compiler.lowerings.cudnn import frontend
from attn_compiler.passes.writing import select
from attn_compiler.spec.attention import AttentionSpec

STEPS = 100


class Layers(nn.Module):
    """Two layers of causal attention that share one spec, over a padded batch."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.projections = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))

    def forward(self, x: torch.Tensor, window: bool) -> torch.Tensor:
        batch, seqlen, width = x.shape
        at = torch.arange(seqlen, device=x.device)
        allowed = at[None, :] <= at[:, None]
        if window:
            allowed = allowed & (at[None, :] > at[:, None] - 16)
        for projection in self.projections:
            qkv = projection(x).view(batch, seqlen, 3, self.heads, width // self.heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
            x = x + out.transpose(1, 2).reshape(batch, seqlen, width)
        return x


def train(
    model: nn.Module, compiled: Any, *, steps: int, shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        compiled(torch.randn(shape, dtype=dtype, device=device), True).float().square().mean().backward()
        optimizer.step()


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[AttentionSpec]:
    """Every spec that a lowering was selected for, in order."""
    specs: list[AttentionSpec] = []
    decide = select.decide
    monkeypatch.setattr(select, "decide", lambda spec, *rest: (specs.append(spec), decide(spec, *rest))[1])
    return specs


def check(decided: list[AttentionSpec], lowering: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    attn_compiler.reset()
    counters.clear()
    late = frontend.PLANS.counts.late
    options = {"lowering": lowering, "inner": "aot_eager", "strict": True}
    model = Layers(shape[-1], heads=4).to(device, dtype)
    compiled = torch.compile(model, backend="attn_compiler", options=options)
    train(model, compiled, steps=1, shape=shape, dtype=dtype, device=device)
    after_one = (len(decided), counters["stats"]["unique_graphs"], frontend.PLANS.counts.builds)
    train(model, compiled, steps=STEPS - 1, shape=shape, dtype=dtype, device=device)
    assert (len(decided), counters["stats"]["unique_graphs"], frontend.PLANS.counts.builds) == after_one
    assert after_one[:2] == (1, 1), "one selection for both layers, one graph"
    assert frontend.PLANS.counts.late == late
    (report,) = attn_compiler.reports()
    assert [site.decision.lowering for site in report.sites] == [lowering]
    assert report.num_sites == 2

    other = torch.compile(model, backend="attn_compiler", options={**options, "check_invariants": False})
    train(model, other, steps=3, shape=shape, dtype=dtype, device=device)
    assert (len(decided), counters["stats"]["unique_graphs"]) == (2, 2), "a changed option: exactly one more"
    assert frontend.PLANS.counts.builds == after_one[2], "its plans are there already"
    compiled(torch.randn(shape, dtype=dtype, device=device), False)
    assert (len(decided), counters["stats"]["unique_graphs"]) == (3, 3), "another mask: exactly one more"


def test_one_hundred_steps_on_the_cpu(decided: list[AttentionSpec]) -> None:
    check(decided, "reference", (2, 32, 32), torch.float32, "cpu")


@pytest.mark.gpu
def test_one_hundred_steps_with_cudnn(decided: list[AttentionSpec]) -> None:
    pytest.importorskip("cudnn", reason="needs the extra: pip install -e '.[cudnn]'")
    check(decided, "cudnn", (2, 256, 256), torch.bfloat16, "cuda")
