"""Masks that are made in one graph and used in another keep their meaning, and never another one than they have."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attn_compiler
from attn_compiler.passes.recovering import recover
from tests.passes.border_masks import PADDING, B, D, H, S, attend, causal, padded, window
from tests.passes.compiling import Compiled, compiled

_LOWEST = torch.finfo(torch.float32).min
#: whose numbers show what the kernels make of a mask, not the tensor alone
TRITON: dict[str, Any] = {"lowering": "triton", "verify": True}


def additive(q: Tensor) -> Tensor:
    return torch.where(padded(q), 0.0, _LOWEST)


def documents(q: Tensor) -> Tensor:
    """Which document a position is of is known of neither a row nor the diagonal."""
    document = PADDING.long().cumsum(-1)
    return causal(q) & (document[:, None, :, None] == document[:, None, None, :])


def two_of_a_kind(q: Tensor) -> Tensor:
    """What stands for the padding of a key must not depend on the query."""
    return causal(q) & (PADDING[:, None, :, None] | PADDING[:, None, None, :])


def broken(
    make: Callable[[Tensor], Tensor], change: Callable[[Tensor], Any] | None = None
) -> Callable[[Tensor], Tensor]:
    """The mask is made in a graph, changed outside of any, and used in another graph."""

    def function(q: Tensor) -> Tensor:
        mask = make(q)
        torch._dynamo.graph_break()
        if change is not None:
            mask = _apart(change, mask)
        return attend(q, mask)

    return function


@torch._dynamo.disable
def _apart(change: Callable[[Tensor], Any], mask: Tensor) -> Tensor:
    changed = change(mask)
    return mask if changed is None else changed


def _site(run: Compiled) -> Any:
    (site,) = [site for report in run.reports for site in report.sites]
    return site


@pytest.mark.in_turns
@pytest.mark.parametrize(
    ("make", "formula"),
    [
        (causal, "k <= q"),
        (padded, "k <= q ∧ mask[b, 0, 15, k]"),
        (window, "k <= q ∧ q - 3 <= k ∧ mask[b, 0, k, k]"),
        (additive, "k <= q ∧ (mask[b, 0, 15, k] = 0)"),
    ],
)
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_mask_keeps_its_meaning_over_a_graph_break(
    make: Callable[[Tensor], Tensor], formula: str, dynamic: bool | None
) -> None:
    function, q = broken(make), torch.randn(B, H, S, D)
    run = compiled(function, dynamic=dynamic, **({"inner": "aot_eager"} if dynamic else TRITON))
    for _ in range(2):
        torch.testing.assert_close(run(q), function(q))
    found = _site(run).spec.mask
    assert found.reason is None
    assert dynamic or set(found.formula.split(" ∧ ")) == set(formula.split(" ∧ "))
    assert all(v.error is None or v.error <= v.allowed for v in attn_compiler.verifications() if v.allowed is not None)


def _window_of_two(q: Tensor, k: Tensor, kept: Tensor) -> Tensor:
    """Queries and keys are counted by tensors of their own, so that their graph has a symbol for each."""
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    mask = ((i - j).abs() < 3) & kept[:, None, None]
    torch._dynamo.graph_break()
    return F.scaled_dot_product_attention(q, k, k, attn_mask=mask, scale=0.3)


@pytest.mark.parametrize(("queries", "keys", "is_known"), [(16, 16, True), (16, 18, False)])
def test_a_window_of_two_sizes_is_known_where_it_is_square(queries: int, keys: int, is_known: bool) -> None:
    run = compiled(_window_of_two, dynamic=True, inner="aot_eager", verify=True)
    q, k, kept = torch.randn(B, H, queries, D), torch.randn(B, H, keys, D), torch.ones(B, keys, dtype=torch.bool)
    kept[0, 5:7] = False
    torch.testing.assert_close(run(q, k, kept), _window_of_two(q, k, kept), equal_nan=True)
    assert (_site(run).spec.mask.reason is None) is is_known


@pytest.mark.parametrize("make", [documents, two_of_a_kind])
def test_what_no_row_says_stays_a_dense_mask(make: Callable[[Tensor], Tensor]) -> None:
    function, q = broken(make), torch.randn(B, H, S, D)
    run = compiled(function)
    torch.testing.assert_close(run(q), function(q))
    assert _site(run).spec.mask.read == ()


@pytest.mark.parametrize(
    "change",
    [
        lambda mask: mask.__setitem__((..., 0), True),
        lambda mask: mask.clone().logical_not_(),
        lambda mask: mask.transpose(-1, -2),
        lambda mask: mask.transpose_(-1, -2),
        lambda mask: setattr(mask, "data", torch.ones_like(mask)),
    ],
)
def test_a_changed_mask_is_unknown_and_the_report_says_what_helps(change: Callable[[Tensor], Any]) -> None:
    function, q = broken(causal, change), torch.randn(B, H, S, D)
    run = compiled(function)
    torch.testing.assert_close(run(q), function(q))
    assert _site(run).spec.mask.read == ()
    assert recover.COMES_IN in _site(run).notes


@pytest.mark.parametrize(
    ("shape", "grad", "is_said"),
    [
        ((S, S), False, True),
        ((B, 1, S, S), False, True),
        # A bias of each head, one that is learned, and one of the keys alone: nobody could know more of them.
        ((B, H, S, S), False, False),
        ((1, 1, S, S), True, False),
        ((B, 1, 1, S), False, False),
    ],
)
def test_numbers_that_may_mask_and_come_in_are_said_to(shape: tuple[int, ...], grad: bool, is_said: bool) -> None:
    run = compiled(lambda q, bias: F.scaled_dot_product_attention(q, q, q, attn_mask=bias), lowerings=["reference"])
    run(torch.randn(B, H, S, D), torch.randn(shape, requires_grad=grad))
    assert (recover.COMES_IN in _site(run).notes) == is_said
    assert any("compile_model(model)" in each for each in _site(run).remedies) == is_said


class Layer(nn.Module):
    def forward(self, q: Tensor, mask: Tensor) -> Tensor:
        return attend(q, mask)


def test_code_for_one_meaning_is_not_run_with_another() -> None:
    """Equal shapes and dtypes: only the guard tells the masks apart."""
    q = torch.randn(B, H, S, D)
    layer = compiled(Layer(), **TRITON)
    makers = {make: torch.compile(make, backend="attn_compiler") for make in (causal, _flipped, _open)}
    for _ in range(2):
        for make, fast in makers.items():
            mask = fast(q)
            torch.testing.assert_close(layer(q, mask), attend(q, make(q)))
            torch.testing.assert_close(layer(q, mask.clone()), attend(q, make(q)))
            torch.testing.assert_close(layer(q, mask.logical_not_().logical_not_()), attend(q, make(q)))
    words = [site.spec.mask.words for report in layer.reports for site in report.sites]
    assert "causal (proved)" in words
    assert sum("dense" in w and "proved" not in w for w in words) == 1


def _flipped(q: Tensor) -> Tensor:
    at = torch.arange(q.shape[2])
    return at[:, None] <= at


def _open(q: Tensor) -> Tensor:
    return causal(q) | True


def test_many_meanings_do_not_use_up_the_compilations_of_a_function() -> None:
    """PyTorch compiles a function 8 times, and raises then."""
    torch._dynamo.reset()
    attn_compiler.reset()
    q = torch.randn(B, H, S, D)
    layer = torch.compile(Layer(), backend="attn_compiler", fullgraph=True, options={"inner": "eager"})
    for width in range(1, S):
        torch.testing.assert_close(layer(q, _window(width)), attend(q, _window(width)))
    words = [site.spec.mask.words for report in attn_compiler.reports() for site in report.sites]
    assert sum("causal" in w for w in words) == 4
    assert words[-1] == "dense bool[1, 1, 16, 16]"


def _window(width: int) -> Tensor:
    """Made by a function of its own, compiled for itself."""

    def make(q: Tensor) -> Tensor:
        at = torch.arange(q.shape[0])
        return (at[:, None] >= at) & (at[:, None] - at < width)

    make.__code__ = make.__code__.replace(co_name=f"make_{width}")
    return torch.compile(make, backend="attn_compiler", dynamic=False, options={"inner": "eager"})(torch.zeros(S))


def test_layers_that_are_compiled_one_by_one_share_what_is_known() -> None:
    torch._dynamo.reset()
    attn_compiler.reset()
    q = torch.randn(B, H, S, D)
    layers = [Layer() for _ in range(3)]
    mask = torch.compile(padded, backend="attn_compiler")(q)
    for layer in layers:
        layer.compile(backend="attn_compiler", options={"inner": "aot_eager"})
        torch.testing.assert_close(layer(q, mask), attend(q, mask))
    (site,) = [site for report in attn_compiler.reports() for site in report.sites]
    assert site.spec.mask.formula == "k <= q ∧ mask[b, 0, 15, k]"


def test_what_comes_in_as_it_goes_out_is_told_of_only_once_and_may_be_written() -> None:
    """A graph that gives back its input, or one tensor twice, says nothing of it."""

    def function(q: Tensor, given: Tensor) -> Tensor:
        mask = causal(q)
        again = mask.view(S, S)
        torch._dynamo.graph_break()
        again[:, 0] = False
        mask[0, 0] = True
        torch._dynamo.graph_break()
        return attend(q, mask) + attend(q, given)

    q, given = torch.randn(B, H, S, D), torch.rand(S, S) > 0.2
    given.fill_diagonal_(True)
    run = compiled(function)
    torch.testing.assert_close(run(q, given), function(q, given))


# ---- graphs in a row ----------------------------------------------------------------------------------------------


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(H * D, 3 * H * D), nn.Linear(H * D, H * D)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class _Stack(nn.Module):
    """writes: whether a layer changes the mask for those that follow."""

    def __init__(self, make: Callable[[Tensor], Tensor], *, writes: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Attention() for _ in range(4))
        self.make, self.writes = make, writes

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = self.make(x[:, None]) if mask is None else mask
        for place, layer in enumerate(self.layers):
            x = layer(x, mask)
            if self.writes and place == 1:
                mask[..., 0] = True
        return x


def _buckets(plain: nn.Module, mask: Callable[[], Tensor] | None = None) -> Compiled:
    torch.manual_seed(0)
    wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(plain), bucket_cap_mb=0.001)
    run = compiled(wrapped)
    x = torch.randn(B, S, H * D)
    # A mask of its own for each: they may write to it.
    masks = [] if mask is None else [mask(), mask().clone()]
    got, wanted = run(x, *masks[:1]), plain(x, *masks[1:])
    torch.testing.assert_close(got, wanted)
    got.sin().sum().backward()
    wanted.sin().sum().backward()
    for (name, mine), right in zip(wrapped.module.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, right.grad, msg=lambda text, name=name: f"{name}: {text}")
    assert len(run.reports) > 2
    return run


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("make", [causal, padded, additive])
def test_every_bucket_knows_the_mask(make: Callable[[Tensor], Tensor]) -> None:
    run = _buckets(_Stack(make))
    words = [site.spec.mask.words for report in run.reports for site in report.sites for _ in site.modules]
    assert len(words) == 4
    assert all(w.startswith("causal") and "(proved)" in w for w in words)


@pytest.mark.usefixtures("one_process")
def test_a_mask_that_a_bucket_writes_to_is_unknown_from_there_on() -> None:
    run = _buckets(_Stack(causal, writes=True))
    words = [site.spec.mask.words for report in run.reports for site in report.sites for _ in site.modules]
    assert words[0] == "causal (proved)"
    assert "causal" not in words[-1]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("writes", [False, True])
def test_a_known_mask_that_comes_in_is_unknown_to_buckets_after_a_write(writes: bool) -> None:
    """A bucket may write to it. Later buckets are given the tensor that the frame was called with, and compiled before it runs."""
    torch._dynamo.reset()
    made = torch.compile(causal, backend="attn_compiler", options={"inner": "eager"})
    masks = [made(torch.randn(B, H, S, D)) for _ in range(2)]
    given = iter(masks)
    run = _buckets(_Stack(causal, writes=writes), lambda: next(given))
    words = [site.spec.mask.words for report in run.reports for site in report.sites for _ in site.modules]
    assert "causal" in words[0]
    assert ("causal" in words[-1]) is not writes
