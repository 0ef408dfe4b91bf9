"""Steps of a model whose padding is out: checkpointed, in tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from attn_compiler.compiling import unpadded
from attn_compiler.compiling.inner import Inner
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.passes.unpad import batches_before, unpadding
from attn_compiler.passes.unpad.unpadding import PackedWork
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
from tests.passes.unpad.test_zeroing import Coming, cls, held, loss, mean

# Padding is out of layers under gradient checkpointing, too.
FULL = mask_of(LENGTH, LENGTH, LENGTH)


@pytest.fixture(autouse=True)
def always_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small a batch is."""
    monkeypatch.setattr(PackedWork, "is_saved", lambda *_: True)


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
    monkeypatch.setattr(batches_before, "Arriving", lambda told: Coming(told, 0))
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


# Where lengths come in steps, the batch's own padding fills them up.
STEP = 8
RECORDED = {"triton.cudagraphs": True, "triton.cudagraph_skip_dynamic_graphs": False}


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of packed graphs that ran, in steps of 8."""
    found: list[int] = []
    own = unpadding.Unpadded._length

    def noted(self: unpadding.Unpadded, number: int, positions: int) -> int:
        found.append(own(self, number, positions))
        return found[-1]

    monkeypatch.setattr(unpadding.Unpadded, "_length", noted)
    monkeypatch.setattr(unpadding, "in_steps", lambda number: -(-number // STEP) * STEP)
    return found


def of(model: Encoder, **further: Any) -> tuple[Encoder, Any]:
    """In float64, asking for CUDA graphs, which are what steps are for."""
    return model.double(), compiled(model, **RECORDED, **further)


MASKS = (MASK, mask_of(1, 10, 0), mask_of(9, 9, 9), mask_of(LENGTH, LENGTH, LENGTH), mask_of(2, 2, 4), mask_of(1, 1, 0))


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("ending", [None, mean, lambda x, mask: (x * mask[..., None]).sum()])
def test_outputs_and_gradients(ending: Callable[..., Any] | None, inner: str, lengths: list[int]) -> None:
    torch.manual_seed(0)
    model, function = of(Encoder(ending=ending), inner=inner)
    for mask in MASKS:
        held(model, function, mask)
        assert report().last[-1].failed == ()
    assert lengths == [24, 16, 30, 30, 8, 8]


@pytest.mark.parametrize("kind", [Windowed, Decoder])
@pytest.mark.parametrize("left", [False, True])
def test_bands(kind: type[Encoder], left: bool, lengths: list[int]) -> None:
    """Padding behind the last row is near to its tokens."""
    torch.manual_seed(0)
    model, function = of(kind())
    for mask in (mask_of(4, 10, 7, left=left), mask_of(3, 2, 5, left=left), mask_of(10, 0, 1, left=left)):
        held(model, function, mask)
        assert report().last[-1].failed == ()
    assert lengths == [24, 16, 16]


@pytest.mark.parametrize("left", [False, True])
def test_losses(left: bool, lengths: list[int]) -> None:
    """Labels at what fills up are ignored. What has a label is a token, and no such padding."""
    torch.manual_seed(0)
    model, function = of(Decoder(ending=loss), inner="aot_eager")
    for mask in (mask_of(4, 10, 7, left=left), mask_of(3, 2, 5, left=left)):
        labels = (ids_of(mask) % WIDTH).masked_fill(mask == 0, -100)
        shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
        for given in (labels, shifted):
            held_on_real_tokens(model, function, mask, given)
            assert report().last[-1].failed == ()
    assert all(length % STEP == 0 for length in lengths)


def held_on_real_tokens(model: Encoder, function: Any, mask: torch.Tensor, labels: torch.Tensor) -> None:
    ids = ids_of(mask)
    found, expected = function(ids, mask, labels=labels), model(ids, mask, labels=labels)
    torch.testing.assert_close(found[0], expected[0], atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(found[1][mask.bool()], expected[1][mask.bool()], atol=1e-12, rtol=1e-10)
    gradients = [torch.autograd.grad(x[0], list(model.parameters()), allow_unused=True) for x in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("options", [{}, {"triton.cudagraphs": True}])
def test_there_are_none_unless_each_is_to_be_recorded(options: dict[str, Any], lengths: list[int]) -> None:
    torch.manual_seed(0)
    model = Encoder().double()
    held(model, compiled(model, **options), MASK)
    assert lengths == [21]


def test_the_first_token_of_each_row(lengths: list[int]) -> None:
    torch.manual_seed(0)
    model, function = of(Encoder(ending=cls))
    held(model, function, MASK)
    assert report().last[-1].failed == ()
    assert lengths == [24]


@pytest.mark.further
@pytest.mark.parametrize("training", [False, True])
def test_tokens_compiled_by_inductor(training: bool, lengths: list[int]) -> None:
    """Its graphs take the length as a number: a CUDA graph is found by it."""
    torch.manual_seed(0)
    model = Encoder(ending=mean).double()
    function = compiled(model, inner="inductor", **RECORDED)
    for mask in MASKS[:3]:
        if training:
            held(model, function, mask)
        else:
            with torch.no_grad():
                torch.testing.assert_close(function(ids_of(mask), mask), model(ids_of(mask), mask))
    assert lengths == [24, 16, 30]
