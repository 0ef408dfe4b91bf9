"""Padding is out of layers under gradient checkpointing, too: what is recomputed, and how, stays the model's choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from attn_compiler.compiling import unpadded
from attn_compiler.compiling.inner import Inner
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.torch_private import batches_before
from tests.passes.unpad.encoder import (
    LENGTH,
    MASK,
    WIDTH,
    Decoder,
    Encoder,
    Windowed,
    compiled,
    ids_of,
    mask_of,
    report,
)
from tests.passes.unpad.test_zeroing import Coming, held, loss, mean

FULL = mask_of(LENGTH, LENGTH, LENGTH)


class Checkpointed(Encoder):
    """own_masks: each layer makes the mask in its checkpoint."""

    own_masks = False

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, **further: torch.Tensor) -> Any:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        allowed = self.allowed(mask)
        for layer in self.layers:
            if self.own_masks:
                x = checkpoint(lambda x, layer=layer: layer(x, self.allowed(mask)), x, use_reentrant=False)
            else:
                x = checkpoint(layer, x, allowed, use_reentrant=False)
        return x if self.ending is None else self.ending(x, mask, **further)


class CheckpointedDecoder(Checkpointed, Decoder):
    pass


class CheckpointedWindow(Checkpointed, Windowed):
    pass


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """Those that the inner compiler is given."""
    found: list[fx.GraphModule] = []
    for name in ("compile_rewritten", "compile_original"):
        own = getattr(Inner, name)

        def noted(self: Inner, gm: fx.GraphModule, inputs: Any, *key: Any, own: Any = own) -> Any:
            found.append(gm)
            return own(self, gm, inputs, *key)

        monkeypatch.setattr(Inner, name, noted)
    return found


def checkpoints_of(gm: fx.GraphModule) -> int:
    """Checkpoints with an attention in their bodies; there is none outside."""
    names = [target_name(node) for node in gm.graph.nodes if node.op == "call_function"]
    assert not any("attention" in name or name == "rows" for name in names)
    return names.count("tag_activation_checkpoint")


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", [Checkpointed, CheckpointedDecoder, CheckpointedWindow])
@pytest.mark.parametrize("own_masks", [False, True])
def test_layers(kind: type[Checkpointed], own_masks: bool, inner: str, graphs: list[fx.GraphModule]) -> None:
    torch.manual_seed(0)
    model = kind(ending=lambda x, mask: (x, mean(x, mask))).double()
    model.own_masks = own_masks
    function = compiled(model, inner=inner)
    for mask in (MASK, FULL, mask_of(3, 0, 9), MASK):
        held(model, function, mask)
        assert report().kept is None
        assert report().last[-1].failed == ()
    assert [checkpoints_of(gm) for gm in graphs] == [2] * len(graphs)


def test_the_padded_graph_has_them_too(monkeypatch: pytest.MonkeyPatch, graphs: list[fx.GraphModule]) -> None:
    monkeypatch.setattr(unpadded, "_is_launched", lambda _: True)
    monkeypatch.setattr(batches_before, "arriving", lambda told: Coming(told, 0))
    torch.manual_seed(0)
    model = CheckpointedDecoder(ending=loss).double()
    function = compiled(model, inner="aot_eager")
    for mask in (FULL, FULL, FULL, MASK, MASK):
        held(model, function, mask, labels=(ids_of(mask) % WIDTH).masked_fill(mask == 0, -100))
    assert any(batches_before.MUCH_PADDING in step.failed for step in report().last)
    assert [checkpoints_of(gm) for gm in graphs] == [2, 2]


def test_what_fails_for_a_batch_runs_padded(graphs: list[fx.GraphModule]) -> None:
    torch.manual_seed(0)
    model = Checkpointed(ending=lambda x, mask: x[:, 0]).double()
    held(model, compiled(model, inner="aot_eager"), mask := mask_of(4, 10, 7, left=True))
    assert "the first token" in report().last[-1].failed[0]
    assert [checkpoints_of(gm) for gm in graphs] == [2, 2]
    assert mask.shape == MASK.shape


@pytest.mark.parametrize("options", [{}, {"checkpoint": "keep_attention"}])
def test_where_padding_stays_they_are_as_they_were(options: dict[str, Any], graphs: list[fx.GraphModule]) -> None:
    torch.manual_seed(0)
    model = Checkpointed(ending=lambda x, mask: x.mean(1))
    found = compiled(model, inner="aot_eager", **options)(ids_of(MASK), MASK)
    assert report().kept is not None
    torch.testing.assert_close(found, model(ids_of(MASK), MASK))
    assert [checkpoints_of(gm) for gm in graphs] == [2]


@pytest.mark.further
@pytest.mark.parametrize("options", [{}, {"checkpoint": "keep_attention"}, {"verify": True}])
def test_compiled_by_inductor(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Checkpointed(ending=mean).double()
    function = compiled(model, inner="inductor", **options)
    for mask in (MASK, FULL, MASK):
        held(model, function, mask)
    assert report().last[-1].failed == ()


def test_dropout_is_drawn_again_as_it_was() -> None:
    """Else the gradient is not of the loss that was computed: here by a difference in one direction."""

    class Dropping(Checkpointed):
        pass

    torch.manual_seed(0)
    model = Dropping(ending=mean, dropout=0.3).double().train()
    function = compiled(model, inner="aot_eager")
    ids, weight = ids_of(MASK), model.layers[0].out.weight

    def value() -> torch.Tensor:
        torch.manual_seed(7)
        found: torch.Tensor = function(ids, MASK)
        return (found * torch.arange(float(WIDTH))).sum()

    (gradient,) = torch.autograd.grad(value(), weight)
    step = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2), dtype=weight.dtype) * 1e-5
    with torch.no_grad():
        weight += step
        after = value()
        weight -= 2 * step
        before = value()
        weight += step
    assert report().kept is None
    assert float(after - before) == pytest.approx(float((2 * step * gradient).sum()), rel=1e-4)
