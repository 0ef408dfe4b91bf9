"""Padding is out of encoders of each kind, and what they give is the model's; or it stays, with the op to blame in the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import attn_compiler
from attn_compiler.options.options import Options
from attn_compiler.passes import rewrite
from attn_compiler.passes.unpad.unpadding import PackedWork
from attn_compiler.torch_private.store import Store
from tests.passes.unpad.encoder import (
    LENGTH,
    MASK,
    WIDTH,
    Between,
    Decoder,
    Encoder,
    Ending,
    Windowed,
    between_axes_of_one,
    check,
    compiled,
    first,
    ids_of,
    labels_of,
    last,
    loss,
    mask_of,
    masked_mean,
    on_real_tokens,
    report,
    weighed_loss,
)

# ---- what is taken out ---------------------------------------------------------------------------------------------------


@pytest.mark.in_turns
@pytest.mark.parametrize("kind", [Encoder, Decoder, Windowed])
@pytest.mark.parametrize("left", [False, True])
def test_hidden_states(kind: type[Encoder], left: bool) -> None:
    found = check(kind(), mask_of(4, 10, 7, left=left))
    assert found.kept is None
    assert len(found.zeroed) == 1
    assert found.last[-1].failed == ()
    assert found.last[-1].fill == pytest.approx(21 / 30)


def test_what_is_given_at_padding_is_zero() -> None:
    out = compiled(Encoder())(ids_of(MASK), MASK)
    assert out[MASK == 0].abs().max() == 0
    assert out[MASK == 1].abs().min() > 0


@pytest.mark.parametrize("ending", [masked_mean, first, last])
def test_poolings(ending: Ending) -> None:
    found = check(Encoder(ending=ending), mask_of(4, 10, 7, left=ending is last))
    assert found.kept is None
    assert found.zeroed == ()
    assert "nothing visible changes" in found.notes[0]
    assert found.last[-1].failed == ()


def test_losses() -> None:
    for ending in (loss, weighed_loss):
        labels = labels_of(MASK) if ending is loss else ids_of(MASK) % WIDTH
        found = check(Encoder(ending=ending), labels=labels)
        assert found.kept is None
        assert found.last[-1].failed == ()


def test_fills_change_without_compiling_again() -> None:
    model = Encoder()
    function = compiled(model)
    for lengths in ((1, 2, 3), (10, 10, 10), (5, 1, 9), (10, 1, 1)):
        assert check(model, mask_of(*lengths), function).last[-1].failed == ()
    assert len(attn_compiler.reports()) == 1


def test_a_mask_with_gaps() -> None:
    mask = MASK.clone()
    mask[1, 3] = mask[2, 0] = 0
    for kind in (Encoder, Decoder):
        assert check(kind(), mask).last[-1].failed == ()


def test_a_row_that_is_empty() -> None:
    found = check(Encoder(ending=masked_mean), mask_of(4, 1, 7))
    assert found.kept is None
    model, mask = Encoder(), mask_of(4, 0, 7)
    function = compiled(model)
    expected, out = (on_real_tokens(f(ids_of(mask), mask), mask) for f in (model, function))
    torch.testing.assert_close(out[[0, 2]], expected[[0, 2]], atol=2e-6, rtol=1e-5)
    assert out[1].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    found = check(Encoder().to(dtype), close=4e-2)
    assert found.kept is None


@pytest.mark.further
def test_autocast_inside_and_around() -> None:
    class Inside(Encoder):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor, **further: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(ids, mask)

    model = Inside()
    assert check(model, close=4e-2).kept is None
    assert compiled(model)(ids_of(MASK), MASK).dtype == model(ids_of(MASK), MASK).dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert check(Encoder(), close=4e-2).kept is None


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_through_aotautograd_and_inductor(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedWork, "is_saved", lambda *_: True)
    model = Decoder(ending=loss)
    function = compiled(model, inner=inner)
    for lengths in ((4, 10, 7), (10, 2, 1)):
        mask = mask_of(*lengths)
        assert check(model, mask, function, labels=labels_of(mask)).last[-1].failed == ()


def test_sizes_that_are_not_known() -> None:
    model = Encoder(ending=masked_mean)
    function = compiled(model, dynamic=True, inner="aot_eager")
    for mask in (MASK, mask_of(3, 12, 5, 6, length=12), mask_of(16, 2, length=16)):
        found = check(model, mask, function)
        assert found.kept is None
        assert found.last[-1].failed == ()


def test_verify_compares_real_tokens_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_compiler.verifying import verifications

    model = Encoder(ending=lambda x, mask: (x, masked_mean(x, mask)))
    check(model, function=compiled(model, verify=True, inner="aot_eager"))
    said = {str(one.subject): one for one in verifications()}
    assert said["graph outputs"].skipped is None
    assert said["graph gradients"].skipped is None


# ---- facts that only the data knows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "mask", "word"),
    [
        (Encoder(ending=first), mask_of(4, 10, 7, left=True), "the first token"),
        (Encoder(ending=last), MASK, "the last token"),
        (Encoder(ending=first), mask_of(4, 0, 7), "the first token"),
        (Windowed(), torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1, 1]] * 3), "side by side"),
    ],
)
def test_the_padded_graph_runs_where_a_fact_does_not_hold(model: Encoder, mask: torch.Tensor, word: str) -> None:
    function = compiled(model)
    expected = model(ids_of(mask), mask)
    if expected.dim() == 3:
        expected = expected.masked_fill(mask[..., None] == 0, 0)
    torch.testing.assert_close(function(ids_of(mask), mask), expected, equal_nan=True)
    (failed,) = report().last[-1].failed
    assert word in failed


def test_labels_at_padding_that_count() -> None:
    model = Encoder(ending=loss)
    function = compiled(model, inner="aot_eager")
    labels = labels_of(MASK)
    assert check(model, function=function, labels=labels).last[-1].failed == ()
    found = check(model, function=function, labels=labels.masked_fill(labels == -100, 3))
    assert "padding that has a label" in found.last[-1].failed[0]
    assert check(model, function=function, labels=labels).last[-1].failed == ()


@pytest.mark.parametrize("lengths", [(0, 0, 0), (1, 0, 0)])
def test_fewer_than_two_tokens(lengths: tuple[int, ...]) -> None:
    model, mask = Encoder(), mask_of(*lengths)
    function = compiled(model)
    expected = model(ids_of(mask), mask).masked_fill(mask[..., None] == 0, 0)
    torch.testing.assert_close(function(ids_of(mask), mask), expected, equal_nan=True)
    assert "2 tokens" in report().last[-1].failed[0]


# ---- what keeps padding in -------------------------------------------------------------------------------------------------

_CONV = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
_BATCH_NORM = nn.BatchNorm1d(WIDTH)


def _in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y.view(-1)
    z.add_(1)
    return y


NEAR_MISSES: dict[str, Between] = {
    "batch_norm": lambda x: _BATCH_NORM(x.transpose(1, 2)).transpose(1, 2),
    "conv1d": lambda x: _CONV(x.transpose(1, 2)).transpose(1, 2),
    "cumsum": lambda x: x + x.cumsum(1),
    "roll": lambda x: x + x.roll(1, 1),
    "mean": lambda x: x + x.mean(1, keepdim=True),
    "softmax": lambda x: x * x.softmax(1),
    "layer_norm": lambda x: F.layer_norm(x.transpose(1, 2), (LENGTH,)).transpose(1, 2),
    "slice": lambda x: x + F.pad(x[:, 1:], (0, 0, 0, 1)),
    "flip": lambda x: x.flip(1),
    "sort": lambda x: x.sort(1).values,
    "max": lambda x: x + x.amax(1, keepdim=True),
    "matmul": lambda x: x + x @ x.transpose(1, 2) @ x,
    "view": lambda x: x.view(x.shape[0], 2, 5, WIDTH).flatten(1, 2) * 2 + x.view(-1, 5, WIDTH).mean(1)[0],
    "cat": lambda x: torch.cat((x, x[:, :1]), 1)[:, 1:],
    "add_": _in_place,
    "rand": lambda x: x * (1 + 0 * torch.rand_like(x)),
    "std": lambda x: x / (x.std(1, keepdim=True) + 1),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_is_no_op_of_each_position_keeps_padding_in(name: str) -> None:
    model = Encoder(between=NEAR_MISSES[name]).eval()
    function = compiled(model)
    out = function(ids_of(MASK), MASK)
    found = report()
    assert found.kept is not None, name
    assert found.source is not None or name == "view", found
    torch.testing.assert_close(out, model(ids_of(MASK), MASK))


def _mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.mean(1)


def _unmasked_sum(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.sum(1)


def _summed_by_inverse(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (x * (1 - mask)[..., None]).sum(1)


def _maximum(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.amax(1)


def _second(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x[:, 1]


def _weighted(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x.view(-1, WIDTH), mask.view(-1), weight=torch.arange(WIDTH).float() + 1)


@pytest.mark.parametrize("ending", [_mean, _unmasked_sum, _summed_by_inverse, _maximum, _second, _weighted])
def test_endings_that_see_padding_keep_it_in(ending: Ending) -> None:
    model = Encoder(ending=ending).eval()
    out = compiled(model)(ids_of(MASK), MASK)
    assert report().kept is not None
    torch.testing.assert_close(out, model(ids_of(MASK), MASK))


def test_models_whose_masks_are_no_padding_keep_it_in() -> None:
    class Unmasked(Encoder):
        def allowed(self, mask: torch.Tensor) -> torch.Tensor:
            return torch.ones(1, 1, 1, mask.shape[1], dtype=torch.bool)

    class Biased(Encoder):
        def allowed(self, mask: torch.Tensor) -> torch.Tensor:
            at = torch.arange(mask.shape[1])
            bias = -(at[:, None] - at[None, :]).abs().float()[None, None]
            return bias.masked_fill(mask[:, None, None, :] == 0, float("-inf"))

    class Varied(Encoder):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor, **further: torch.Tensor) -> torch.Tensor:
            x = self.words(ids)
            x = self.layers[0](x, self.allowed(mask))
            return self.layers[1](x, self.allowed((ids != 3).long()))

    for kind in (Unmasked, Biased, Varied):
        model = kind().eval()
        out = compiled(model)(ids_of(MASK), MASK)
        assert report().kept is not None, kind
        torch.testing.assert_close(out, model(ids_of(MASK), MASK))


@pytest.mark.parametrize(("dynamic", "left"), [(False, False), (True, True)])
@pytest.mark.parametrize("kind", [Encoder, Decoder, Windowed])
def test_a_batch_of_one_row_leaves_padding_out(kind: type[Encoder], left: bool, dynamic: bool) -> None:
    mask = mask_of(4, left=left)
    for ending in (None, masked_mean, last if left else first, loss, weighed_loss):
        model = kind(between=between_axes_of_one, ending=ending)
        further = {"labels": labels_of(mask)} if ending in (loss, weighed_loss) else {}
        steps = check(model, mask, compiled(model, dynamic=dynamic), **further).steps
        assert steps is not None
        assert [(step.number, step.failed) for step in steps.last] == [(4, ())]


def test_a_batch_of_one_row_is_zero_at_padding_packed_or_not() -> None:
    model = Encoder(ending=lambda x, mask: (x, x[:, 0])).eval()
    function = compiled(model)
    for mask in (mask_of(4), mask_of(4, left=True)):
        out, _ = function(ids_of(mask), mask)
        assert torch.equal(out, out * mask[..., None])
        torch.testing.assert_close(out, on_real_tokens(model(ids_of(mask), mask)[0], mask), atol=2e-6, rtol=1e-5)
    steps = report().steps
    assert steps is not None
    assert [bool(step.failed) for step in steps.last] == [False, True]


def test_one_row_of_padding_for_several_rows_keeps_it_in() -> None:
    model = Encoder().eval()
    mask, ids = mask_of(4), ids_of(MASK)
    out = compiled(model)(ids, mask)
    assert report().kept is not None
    torch.testing.assert_close(out, model(ids, mask))


def test_attention_dropout_keeps_padding_in_on_a_cpu() -> None:
    model = Encoder()
    for layer in model.layers:
        layer.between = lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.5)[
            :, 0
        ]
    compiled(model)(ids_of(MASK), MASK)
    assert report().kept is not None


def test_hidden_dropout_is_told_to_be_equal_in_law() -> None:
    compiled(Encoder(dropout=0.5).train())(ids_of(MASK), MASK)
    assert any("statistically equal" in note for note in report().notes)
    compiled(Encoder(dropout=0.5).eval())(ids_of(MASK), MASK)
    assert not any("statistically equal" in note for note in report().notes)


def test_a_checkpoint_in_a_checkpoint_keeps_padding_in() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Encoder):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor, **further: torch.Tensor) -> torch.Tensor:
            def inner(x: torch.Tensor) -> torch.Tensor:
                return checkpoint(self.layers[0], x, self.allowed(mask), use_reentrant=False)

            return checkpoint(lambda x: inner(x) * 2, self.words(ids), use_reentrant=False)

    model = Checkpointed()
    out = compiled(model, inner="aot_eager")(ids_of(MASK), MASK)
    kept = report().kept
    assert kept is not None
    assert "body" in kept.observed
    torch.testing.assert_close(out, model(ids_of(MASK), MASK))


def test_keys_that_are_given_back_keep_padding_in() -> None:
    class Cached(Encoder):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor, **further: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x = self.layers[0](self.words(ids), self.allowed(mask))
            q = x.view(*ids.shape, 2, -1).transpose(1, 2)
            k, v = q * 2, q + 1
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.allowed(mask))
            return y.transpose(1, 2), k, v

    model = Cached()
    torch.testing.assert_close(compiled(model)(ids_of(MASK), MASK), model(ids_of(MASK), MASK))
    kept = report().kept
    assert kept is not None
    assert "cache" in kept.rule


def test_nobody_who_did_not_ask_gets_it() -> None:
    torch._dynamo.reset()
    attn_compiler.reset()
    model = Encoder()
    out = torch.compile(model, backend="attn_compiler", options={"inner": "eager"})(ids_of(MASK), MASK)
    assert attn_compiler.reports()[-1].unpad is None
    torch.testing.assert_close(out, model(ids_of(MASK), MASK))


def test_the_rewrite_is_not_kept_on_disk(tmp_path: Path) -> None:
    found = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        found.append(rewrite(gm, Options(unpad=True), store=Store(root=tmp_path)).report)
        return lambda *args: [torch.zeros(())]

    torch._dynamo.reset()
    torch.compile(Encoder(), backend=backend)(ids_of(MASK), MASK)
    assert "unpad" in (found[0].not_kept or "")
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
