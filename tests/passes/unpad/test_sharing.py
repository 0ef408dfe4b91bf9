"""What rows of a batch share is computed once, and outputs and gradients are the model's; or it is not, with the reason in the report."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attn_compiler
from attn_compiler.passes.unpad import agreeing
from attn_compiler.passes.unpad.agreeing import shared_batch
from attn_compiler.reasons.codes import Code
from attn_compiler.reporting.facts import UnpadReport
from tests.interpreted_target import triton_interpreted
from tests.passes.unpad import encoder
from tests.passes.unpad.encoder import LENGTH, WIDTH, WORDS, Decoder, Encoder, mask_of

#: 3 prompts, of 6, 4 and 0 tokens that are shared
GROUPS = (0, 1, 0, 2, 1, 0)


def ids_of(groups: tuple[int, ...] = GROUPS, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (len(groups), LENGTH), generator=generator)
    for row, group in enumerate(groups):
        shared = max(6 - 2 * group, 0) if group < 2 else 0
        ids[row, :shared] = (torch.arange(shared) * 7 + group) % WORDS
        ids[row, shared] = 30 + row
    return ids


class Looking(Decoder):
    """Sees `back` tokens back, and nothing that comes later, or `ahead` of it."""

    def __init__(self, back: int, ahead: int = 0, **further: Any) -> None:
        super().__init__(**further)
        self.back, self.ahead = back, ahead

    def allowed(self, mask: Tensor) -> Tensor:
        at = torch.arange(mask.shape[1])
        behind = at[:, None] - at[None, :]
        return ((behind <= self.back) & (behind >= -self.ahead))[None, None] & mask[:, None, None, :].bool()


class Prefixed(Decoder):
    """The first three tokens see each other."""

    def allowed(self, mask: Tensor) -> Tensor:
        at = torch.arange(mask.shape[1])
        return ((at[:, None] >= at[None, :]) | (at < 3))[None, None] & mask[:, None, None, :].bool()


class Unmasked(Encoder):
    """Causal, and told nothing of padding."""

    def allowed(self, mask: Tensor) -> Tensor:
        at = torch.arange(mask.shape[1])
        return (at[:, None] >= at[None, :])[None, None]


def mean(x: Tensor, mask: Tensor) -> Tensor:
    return x.mean(1)


def parts(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    return x[:, -4:-1] * 2, x.softmax(1), x[:, 0], x.flip(1)


def loss(x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x.view(-1, WIDTH), labels.view(-1))


def weighed(x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    picked = F.log_softmax(x, -1).gather(-1, labels[..., None].clamp(min=0))[..., 0]
    return picked * torch.linspace(-1, 1, len(mask), dtype=x.dtype)[:, None]


def row_by_row(x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return (weighed(x, mask, labels) * (labels != -100)).sum(1) / mask.sum(1)


def pair_by_pair(x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """As in DPO: of rows that share a prompt, one was chosen."""
    chosen, rejected = row_by_row(x, mask, labels).chunk(2)
    return -F.logsigmoid(chosen - rejected)


def across(x: Tensor, mask: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


def check(model: nn.Module, mask: Tensor, groups: tuple[int, ...] = GROUPS, **further: Any) -> UnpadReport:
    """Outputs, at padding too, and gradients are eager's, for three batches."""
    model = model.double()
    function = encoder.compiled(model, unpad=False, share_prefix=True, **further.pop("options", {}))
    for seed in range(3):
        given = {name: x if x.shape != mask.shape else x.roll(seed, 0) for name, x in further.items()}
        ids = ids_of(groups, seed)
        expected, found = model(ids, mask, **given), function(ids, mask, **given)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
        own, others = (encoder._gradients([*x] if isinstance(x, tuple) else x, model) for x in (found, expected))
        torch.testing.assert_close(own, others, atol=1e-12, rtol=1e-12)
    return encoder.report()


FULL = mask_of(*[LENGTH] * 6)
RIGHT, LEFT = mask_of(10, 7, 9, 8, 10, 6), mask_of(10, 7, 10, 8, 7, 10, left=True)
HOLED = RIGHT.clone()
HOLED[:, 2] = 0


@pytest.mark.parametrize("mask", [FULL, RIGHT, LEFT, HOLED], ids=["full", "right", "left", "holes"])
@pytest.mark.parametrize("kind", [Decoder, lambda **k: Looking(3, **k), Unmasked], ids=["causal", "window", "unmasked"])
def test_rows_that_begin_alike_are_computed_once(kind: Any, mask: Tensor) -> None:
    found = check(kind(), mask)
    assert found.kept is None
    assert found.shares
    assert not found.zeroed
    assert all(not step.failed and step.number < mask.numel() for step in found.last)
    if mask is FULL:
        assert {(step.number, step.positions, step.groups) for step in found.last} == {(60 - 12 - 4, 60, 3)}


@pytest.mark.parametrize("ending", [mean, parts, across], ids=lambda x: x.__name__)
def test_ops_that_mix_positions_read_the_models_own_tensor(ending: Any) -> None:
    found = check(Decoder(ending=ending), RIGHT)
    assert found.kept is None
    assert found.notes[0] == "nothing visible changes"
    assert not found.zeroed


@pytest.mark.parametrize("ending", [loss, weighed, row_by_row, pair_by_pair], ids=lambda x: x.__name__)
def test_labels_may_differ_where_rows_are_alike(ending: Any) -> None:
    labels = torch.randint(0, WIDTH, RIGHT.shape, generator=torch.Generator().manual_seed(5))
    labels[:, 8:] = -100
    found = check(Decoder(ending=ending), RIGHT, labels=labels)
    assert {step.number for step in found.last} == {60 - 12 - 4}


@pytest.mark.parametrize("between", [lambda x: x - x.mean(0), lambda x: x + x.mean()], ids=["of a position", "of all"])
def test_what_is_the_same_for_all_rows_may_be_made_of_all(between: Any) -> None:
    assert check(Decoder(between=between), RIGHT).kept is None


def test_rows_that_share_nothing_are_right_too() -> None:
    found = check(Decoder(), FULL, (2, 2, 2, 2, 2, 2))
    assert found.last[-1].groups == 6


def test_equal_rows_are_one() -> None:
    model = Decoder().double()
    function = encoder.compiled(model, unpad=False, share_prefix=True)
    ids = ids_of((0,)).expand(6, -1).contiguous()
    torch.testing.assert_close(function(ids, FULL), model(ids, FULL))
    assert [(step.number, step.groups) for step in encoder.report().last] == [(LENGTH, 1)]


def test_sizes_may_be_symbols() -> None:
    model = Decoder().double()
    function = encoder.compiled(model, unpad=False, share_prefix=True, dynamic=True)
    for groups in (GROUPS, GROUPS[:4], GROUPS[:2]):
        ids, mask = ids_of(groups), mask_of(*[LENGTH] * len(groups))
        torch.testing.assert_close(function(ids, mask), model(ids, mask))
    assert encoder.report().kept is None


class Picking(Decoder):
    """Reads its mask by rows that it counts itself, as Transformers does."""

    def forward(self, ids: Tensor, mask: Tensor, **further: Tensor) -> Any:
        rows, at = torch.arange(ids.shape[0])[:, None], torch.arange(ids.shape[1])[None]
        return super().forward(ids, mask[rows, at], **further)


def test_a_mask_may_have_a_number_of_rows_of_its_own() -> None:
    model = Picking().double()
    function = encoder.compiled(model, unpad=False, share_prefix=True)
    ids, mask = ids_of(), RIGHT.clone()
    torch._dynamo.mark_dynamic(ids, 0)
    torch._dynamo.mark_dynamic(mask, 0)
    torch.testing.assert_close(function(ids, mask), model(ids, mask))
    assert [step.number for step in encoder.report().last] == [44]


def turned(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def test_stacked_tokens_are_packed() -> None:
    assert check(Decoder(between=turned), RIGHT).kept is None


def test_kernels_of_a_gpu_serve_it() -> None:
    model = Looking(3)
    with triton_interpreted():
        function = encoder.compiled(model, unpad=False, share_prefix=True, lowering="triton")
        found = function(ids_of(), LEFT)
        expected = model(ids_of(), LEFT)
        torch.testing.assert_close(found, expected)
        own, others = (encoder._gradients(x, model) for x in (found, expected))
    torch.testing.assert_close(own, others, atol=1e-4, rtol=1e-4)
    assert [site.decision.lowering for site in attn_compiler.reports()[-1].sites] == ["triton"]
    assert [step.number for step in encoder.report().last] == [44]


class Told(Decoder):
    """Adds a number of each token, or of each row."""

    def forward(self, ids: Tensor, mask: Tensor, **further: Tensor) -> Any:
        x = self.words(ids) + further["told"]
        allowed = self.allowed(mask)
        for layer in self.layers:
            x = layer(x, allowed)
        return x


@pytest.mark.parametrize(
    ("told", "number"),
    [
        (torch.zeros(6, LENGTH, 1), 44),
        (torch.arange(6.0).view(6, 1, 1) * torch.arange(LENGTH).ge(3).view(1, -1, 1), 60 - 2 * 3 - 3),
        (torch.arange(6.0).view(6, 1, 1), 60),
        (torch.arange(float(LENGTH)).view(1, -1, 1), 44),
        (torch.zeros(6, LENGTH, 1).index_fill(0, torch.tensor([2]), -0.0), 44 + 6),
        (torch.full((6, 1, 1), torch.nan), 44),
        (torch.zeros(6, LENGTH, WIDTH), 44),
        (torch.eye(6, WIDTH).view(6, 1, WIDTH), 60),
    ],
    ids=["equal", "from 3 on", "a row", "a position", "signs", "nan", "wide", "wide, a row"],
)
def test_whatever_goes_in_tells_rows_apart(told: Tensor, number: int) -> None:
    model = Told().double()
    function = encoder.compiled(model, unpad=False, share_prefix=True)
    given = {"told": told.double()}
    expected = model(ids_of(), FULL, **given)
    torch.testing.assert_close(function(ids_of(), FULL, **given), expected, equal_nan=True)
    assert [step.number for step in encoder.report().last] == [number]


def test_equal_sums_of_other_numbers_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreeing, "_number", lambda x: torch.zeros(x.shape[:2], dtype=torch.int64))
    model = Told().double()
    function = encoder.compiled(model, unpad=False, share_prefix=True)
    given = {"told": torch.eye(6, WIDTH).double().view(6, 1, WIDTH)}
    torch.testing.assert_close(function(ids_of((0,) * 6), FULL, **given), model(ids_of((0,) * 6), FULL, **given))
    assert [step.failed for step in encoder.report().last] == [("rows that begin alike were found without an error",)]


@pytest.mark.parametrize(
    ("model", "code", "rule"),
    [
        (Encoder(), Code.PADDING_MASK, "no token sees a later one"),
        (Looking(3, 1), Code.PADDING_MASK, "no token sees a later one"),
        (Prefixed(), Code.PADDING_MASK, "all attentions leave out"),
        (Decoder(dropout=0.1), Code.PADDING_DRAWN, "each row draws its own random numbers"),
        (Decoder(between=lambda x: x.cumsum(1)), Code.MIXES_POSITIONS, "each op"),
        (Decoder(between=lambda x: x + torch.rand_like(x)), Code.PADDING_DRAWN, "each row draws"),
        (Decoder(between=lambda x: F.batch_norm(x.mT, None, None, training=True).mT), Code.MIXES_POSITIONS, "each op"),
    ],
    ids=["both ways", "one ahead", "a prefix that sees itself", "dropout", "sums", "noise", "batch norm"],
)
def test_what_keeps_rows_apart_is_named(model: nn.Module, code: Code, rule: str) -> None:
    model = model.double()
    function = encoder.compiled(model, unpad=False, share_prefix=True)
    torch.manual_seed(0)
    expected = model(ids_of(), RIGHT)
    torch.manual_seed(0)
    torch.testing.assert_close(function(ids_of(), RIGHT), expected)
    found = encoder.report()
    assert found.kept is not None
    assert found.shares
    assert found.kept.code is code
    assert found.kept.rule.startswith(rule)
    # Nothing else helps where other tokens count.
    assert (found.kept.remedy is None) == rule.startswith(("each op", "all attentions"))


def test_inputs_with_a_gradient_are_not_shared() -> None:
    """The gradient of each row's input is its own."""
    model = Told().double()
    function = encoder.compiled(model, unpad=False, share_prefix=True)
    found = []
    for run in (model, function):
        told = torch.zeros(6, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
        (run(ids_of(), FULL, told=told) * torch.arange(6.0).view(6, 1, 1)).sum().backward()
        found.append(told.grad)
    torch.testing.assert_close(*found)
    kept = encoder.report().kept
    assert kept is not None
    assert kept.rule == "what rows are compared by has no gradient"


def test_numbers_of_more_than_64_bits_are_not_compared() -> None:
    class Complex(Told):
        def forward(self, ids: Tensor, mask: Tensor, **further: Tensor) -> Any:
            return super().forward(ids, mask, told=further["told"].abs())

    model = Complex().double()
    function = encoder.compiled(model, unpad=False, share_prefix=True)
    given = {"told": torch.ones(6, LENGTH, 1, dtype=torch.complex128)}
    torch.testing.assert_close(function(ids_of(), FULL, **given), model(ids_of(), FULL, **given))
    kept = encoder.report().kept
    assert kept is not None
    assert kept.rule == "rows are compared by numbers of 64 bits"


def test_the_padding_is_left_out_where_prompts_can_not_be_shared() -> None:
    model = Encoder().double()
    function = encoder.compiled(model, share_prefix=True)
    found, expected = (encoder.on_real_tokens(run(ids_of(), RIGHT), RIGHT) for run in (function, model))
    torch.testing.assert_close(found, expected)
    told = encoder.report()
    assert told.kept is None
    assert not told.shares
    assert told.notes[0].startswith("prompts are not shared, since not: no token sees a later one")


def test_it_verifies_itself() -> None:
    check(Decoder(), LEFT, options={"verify": True})
    assert encoder.report().last


def test_each_token_sees_what_stands_before_it_in_its_row() -> None:
    """By hand: the chain of tokens behind each query, for random rows of few words."""
    generator = torch.Generator().manual_seed(0)
    for batch, length in ((2, 2), (4, 7), (9, 5), (16, 12)):
        ids = torch.randint(0, 2, (batch, length), generator=generator)
        real = torch.rand(batch, length, generator=generator) < 0.8
        windows = (None, 0, 2, 50)
        found, agrees, sees, groups = shared_batch(real, (ids,), windows)
        number = int(found.starts[-1])
        chains = {
            tuple(zip(ids[r, : p + 1].tolist(), real[r, : p + 1].tolist(), strict=True))
            for r in range(batch)
            for p in range(length)
        }
        assert number == len(chains)
        assert bool(agrees)
        assert found.keys is not None
        assert found.places is not None
        for place in range(number):
            row, position = int(found.rows[place]), int(found.positions[place])
            for at, window in enumerate(windows):
                first = 0 if window is None else max(0, position - window)
                expected = [int(found.places[row * length + p]) for p in range(first, position + 1) if real[row, p]]
                seen = found.keys[int(found.begins[at, place]) : int(found.ends[place])].tolist()
                assert seen == expected
        for row in range(batch):
            for position in range(length):
                place = int(found.places[row * length + position])
                leader, own = int(found.rows[place]), slice(0, position + 1)
                assert int(found.positions[place]) == position
                assert torch.equal(ids[leader, own], ids[row, own])
                assert torch.equal(real[leader, own], real[row, own])
        assert bool(sees) == all(bool(real[r, p]) for r in range(batch) for p in range(length))
        assert 1 <= int(groups) <= batch


def test_reports_say_what_was_computed() -> None:
    check(Decoder(), FULL)
    text = str(attn_compiler.reports()[-1])
    assert "shared prompts: computed once" in text
    assert "tokens computed of the last batches: 44 of 60 (3 prompts)" in text
