"""Biases by distance and ALiBi are applied to packed tokens; whatever else joins the scores keeps the padding in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import attn_compiler
from attn_compiler.passes.unpad import packing
from tests.passes.unpad.encoder import (
    HEADS,
    LENGTH,
    MASK,
    Encoder,
    check,
    compiled,
    ids_of,
    mask_of,
    on_real_tokens,
    report,
)


@pytest.fixture(autouse=True)
def with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel for a CPU leaves out other rows and adds a bias by distance."""
    monkeypatch.setattr(packing, "LEAVING_OUT", ("reference",))


def _ahead(length: int) -> torch.Tensor:
    """int64 (S, S): k - q."""
    at = torch.arange(length)
    return at[None, :] - at[:, None]


class Biased(Encoder):
    """What is added is made by `added`, (1 or B, H, S, S)."""

    causal = False

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * LENGTH + 1, HEADS))
        self.register_buffer("slopes", torch.tensor([0.5, 0.125]))

    def added(self, mask: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def allowed(self, mask: torch.Tensor) -> torch.Tensor:
        allowed = mask[:, None, None, :].bool()
        if self.causal:
            allowed = allowed & (_ahead(mask.shape[1]) <= 0)[None, None]
        added = self.added(mask)
        added = added.masked_fill(~allowed, torch.finfo(added.dtype).min)
        return added.expand(mask.shape[0], HEADS, -1, -1)


class Relative(Biased):
    """An element of a table for each distance, up to a largest one."""

    def added(self, mask: torch.Tensor) -> torch.Tensor:
        rows = _ahead(mask.shape[1]).clamp(-4, 4) + LENGTH
        return self.table[rows].permute(2, 0, 1)[None]


class Weighed(Relative):
    def added(self, mask: torch.Tensor) -> torch.Tensor:
        return 0.25 * super().added(mask)


class AlibiOfKeys(Biased):
    """Bloom's: the query's own place is the same for all its keys."""

    causal = True

    def added(self, mask: torch.Tensor) -> torch.Tensor:
        return (self.slopes[:, None, None] * torch.arange(mask.shape[1]))[None]


class AlibiBothWays(Biased):
    def added(self, mask: torch.Tensor) -> torch.Tensor:
        return (-self.slopes[:, None, None] * _ahead(mask.shape[1]).abs())[None]


class LearnedSlopes(Biased):
    def added(self, mask: torch.Tensor) -> torch.Tensor:
        return (-self.table[0, :, None, None] * _ahead(mask.shape[1]).abs())[None]


class AlibiOfTokens(Biased):
    """Falcon's: the mask is counted, and padding has place 0."""

    causal = True

    def added(self, mask: torch.Tensor) -> torch.Tensor:
        places = (mask.cumsum(-1) - 1) * mask
        return self.slopes[None, :, None, None] * places[:, None, None, :]


class Twofold(Relative):
    def added(self, mask: torch.Tensor) -> torch.Tensor:
        return super().added(mask) - self.slopes[:, None, None] * _ahead(mask.shape[1]).abs()


BY_DISTANCE = [Relative, Weighed, AlibiOfKeys, AlibiBothWays, LearnedSlopes, Twofold]


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("kind", [*BY_DISTANCE, AlibiOfTokens])
@pytest.mark.parametrize("left", [False, True])
def test_what_is_added_goes_with_the_tokens(kind: type[Biased], left: bool) -> None:
    found = check(kind(), mask_of(4, 10, 7, left=left))
    assert found.kept is None
    assert found.last[-1].failed == ()


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("kind", BY_DISTANCE)
def test_distances_ask_for_tokens_side_by_side(kind: type[Biased]) -> None:
    mask = MASK.clone()
    mask[1, 3] = 0
    assert "side by side" in check(kind(), mask).last[-1].failed[0]


def test_numbers_of_tokens_do_not() -> None:
    mask = MASK.clone()
    mask[1, 3] = mask[2, 0] = 0
    assert check(AlibiOfTokens(), mask).last[-1].failed == ()


def test_lengths_change_without_compiling_again() -> None:
    model = Relative()
    function = compiled(model)
    for lengths in ((1, 2, 3), (10, 10, 10), (10, 1, 1)):
        assert check(model, mask_of(*lengths), function).last[-1].failed == ()
    assert len(attn_compiler.reports()) == 1


class FrozenFirst(Relative):
    """A layer that is not trained adds what a trained one adds."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        x, added = self.words(ids) + self.places(torch.arange(ids.shape[1])), self.allowed(mask)
        first, second = self.layers
        with torch.no_grad():
            x = first(x, added)
        found: torch.Tensor = second(x, added)
        return found


def test_a_layer_without_gradients_takes_none_from_the_others() -> None:
    assert check(FrozenFirst()).kept is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    assert check(Relative().to(dtype), close=4e-2).kept is None


# ---- near misses ---------------------------------------------------------------------------------------------------------


class ByPlace(Biased):
    """A number for each place of a query, and each of a key."""

    def added(self, mask: torch.Tensor) -> torch.Tensor:
        at = torch.arange(mask.shape[1])
        return (self.table[at, :, None] * self.table[at].T[None]).permute(1, 0, 2)[None]


class ByProduct(Biased):
    """A table's row is picked by more than the distance."""

    def added(self, mask: torch.Tensor) -> torch.Tensor:
        at = torch.arange(mask.shape[1])
        return self.table[(at[:, None] * at[None, :]) % LENGTH].permute(2, 0, 1)[None]


class Given(Biased):
    """A bias that comes ready-made."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, HEADS, LENGTH, LENGTH))

    def added(self, mask: torch.Tensor) -> torch.Tensor:
        return self.bias


class ByRow(Biased):
    """Slopes that differ by batch row."""

    def added(self, mask: torch.Tensor) -> torch.Tensor:
        slopes = self.slopes * mask.sum(1, keepdim=True)
        return -slopes[:, :, None, None] * _ahead(mask.shape[1]).abs()


class Shifted(Biased):
    """A distance from a number that is known at run time only."""

    def added(self, mask: torch.Tensor) -> torch.Tensor:
        rows = (_ahead(mask.shape[1]) + mask[0, 0]).clamp(-4, 4) + LENGTH
        return self.table[rows].permute(2, 0, 1)[None]


class Written(Biased):
    """The table is written in place before it is read."""

    def added(self, mask: torch.Tensor) -> torch.Tensor:
        table = self.slopes.repeat(2 * LENGTH + 1, 1)
        table.mul_(2)
        return table[_ahead(mask.shape[1]).clamp(-4, 4) + LENGTH].permute(2, 0, 1)[None]


class WiderTokens(Biased):
    """Numbers of tokens are a part of a wider tensor."""

    causal = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.arange(3 * 2 * LENGTH).view(3, -1) % 7)

    def added(self, mask: torch.Tensor) -> torch.Tensor:
        return self.slopes[None, :, None, None] * self.numbers[:, : mask.shape[1]][:, None, None, :]


class Detached(Relative):
    """The table is not learned through what is added."""

    def added(self, mask: torch.Tensor) -> torch.Tensor:
        return super().added(mask).detach()


class WithoutGradient(Relative):
    def added(self, mask: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return super().added(mask)


class DetachedInPart(Relative):
    def added(self, mask: torch.Tensor) -> torch.Tensor:
        return super().added(mask) - self.table.detach()[0, :, None, None] * _ahead(mask.shape[1]).abs()


@pytest.mark.parametrize("kind", [Detached, WithoutGradient, DetachedInPart])
def test_a_gradient_that_is_stopped_keeps_the_padding(kind: type[Biased]) -> None:
    kept = check(kind()).kept
    assert kept is not None
    assert "gradient stops" in kept.observed
    assert kept.remedy is not None
    assert "requires_grad" in kept.remedy


def test_numbers_of_tokens_of_other_sizes_are_named() -> None:
    kept = check(WiderTokens()).kept
    assert kept is not None
    assert "the mask is (3, 10)" in kept.observed


def test_a_table_that_is_not_learned_goes_with_the_tokens() -> None:
    model = Relative()
    model.table.requires_grad_(False)
    function = compiled(model)
    weights = [x for x in model.parameters() if x.requires_grad]
    told = []
    for run in (function, model):
        output = on_real_tokens(run(ids_of(MASK), MASK), MASK)
        told.append((output, torch.autograd.grad(output.square().sum(), weights)))
    torch.testing.assert_close(told[0], told[1], atol=1e-4, rtol=1e-4)
    assert report().kept is None


@pytest.mark.parametrize("kind", [Detached, WithoutGradient, DetachedInPart])
def test_without_gradients_there_is_none_to_stop(kind: type[Biased]) -> None:
    model = kind()
    with torch.no_grad():
        found = compiled(model)(ids_of(MASK), MASK)
        torch.testing.assert_close(on_real_tokens(found, MASK), on_real_tokens(model(ids_of(MASK), MASK), MASK))
    assert report().kept is None


@pytest.mark.parametrize("kind", [ByPlace, ByProduct, Given, ByRow, Shifted, Written, WiderTokens])
def test_what_is_added_by_something_else_keeps_the_padding(kind: type[Biased]) -> None:
    found = check(kind())
    assert found.kept is not None


@pytest.mark.parametrize("kind", [ByProduct, Given, Shifted])
def test_the_reason_names_what_is_added(kind: type[Biased]) -> None:
    kept = check(kind()).kept
    assert kept is not None
    assert "distance of query and key" in kept.rule
    assert kept.remedy is not None
    assert "T5" in kept.remedy


def test_without_a_kernel_for_it_padding_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LEAVING_OUT", ("rows",))
    model = Relative()
    kept = check(model).kept
    assert kept is not None
    assert "rows" in kept.observed
    torch.testing.assert_close(compiled(model)(ids_of(MASK), MASK), model(ids_of(MASK), MASK))
