"""Biases that are gathered from learned tables, however a model spells that: the gather is ours, and gradients are eager's in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attn_compiler
from tests.passes.compiling import compiled

B, H, S, D, SIDE = 2, 3, 9, 8, 3
R = (2 * SIDE - 1) ** 2

Function = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def index() -> Tensor:
    """As Swin makes it: (S, S)."""
    at = torch.stack(torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij"), -1).flatten(0, 1)
    apart = at[:, None] - at[None] + SIDE - 1
    return apart[..., 0] * (2 * SIDE - 1) + apart[..., 1]


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def swin(q: Tensor, k: Tensor, v: Tensor, table: Tensor, at: Tensor) -> Tensor:
    bias = table[at.view(-1)].view(S, S, -1).permute(2, 0, 1).contiguous()
    return sdpa(q, k, v, bias[None])


def embedding(q: Tensor, k: Tensor, v: Tensor, table: Tensor, at: Tensor) -> Tensor:
    return sdpa(q, k, v, F.embedding(at, table).permute(2, 0, 1)[None])


def index_select(q: Tensor, k: Tensor, v: Tensor, table: Tensor, at: Tensor) -> Tensor:
    return sdpa(q, k, v, torch.index_select(table, 0, at.flatten()).unflatten(0, (S, S)).permute(2, 0, 1)[None])


def heads_first(q: Tensor, k: Tensor, v: Tensor, table: Tensor, at: Tensor) -> Tensor:
    """As LeViT has it."""
    return sdpa(q, k, v, table.t()[:, at])


def heads_first_of_a_copy(q: Tensor, k: Tensor, v: Tensor, table: Tensor, at: Tensor) -> Tensor:
    return sdpa(q, k, v, table.t().contiguous().index_select(-1, at.view(-1)).view(1, H, S, S))


def two_indices(q: Tensor, k: Tensor, v: Tensor, table: Tensor, at: Tensor) -> Tensor:
    by_place = table.view(2 * SIDE - 1, 2 * SIDE - 1, H)
    return sdpa(q, k, v, by_place[at // (2 * SIDE - 1), at % (2 * SIDE - 1)].permute(2, 0, 1)[None])


def of_distances(q: Tensor, k: Tensor, v: Tensor, table: Tensor, at: Tensor) -> Tensor:
    apart = torch.arange(S)[None] - torch.arange(S)[:, None] + S
    return sdpa(q, k, v, F.embedding(apart, table).permute(2, 0, 1)[None])


def written_out(q: Tensor, k: Tensor, v: Tensor, table: Tensor, at: Tensor) -> Tensor:
    bias = 16 * torch.sigmoid(table[at].permute(2, 0, 1))
    return (q @ k.mT * D**-0.5 + bias).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor, table: Tensor, at: Tensor) -> Tensor:
    """As T5's decoder has it."""
    seen = torch.arange(S)[:, None] >= torch.arange(S)
    return sdpa(q, k, v, torch.where(seen, table[at].permute(2, 0, 1)[None], torch.finfo(q.dtype).min))


def of_two_layers(q: Tensor, k: Tensor, v: Tensor, table: Tensor, at: Tensor) -> Tensor:
    """The gather is one node for both."""
    bias = table[at].permute(2, 0, 1)[None]
    return sdpa(sdpa(q, k, v, bias), k, v, bias)


FUNCTIONS = (
    *(swin, embedding, index_select, heads_first, heads_first_of_a_copy, two_indices, of_distances, written_out),
    *(causal, of_two_layers),
)


def given(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, H, S, D), (B, H, S, D), (B, H, S, D), (R, H))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def results(function: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    tensors = given(dtype)
    out = function(*tensors, index())
    (out.double() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return [out.detach(), *(x.grad for x in tensors if x.grad is not None)]


@pytest.mark.parametrize("lowering", ["math", "triton"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_gradients_are_eagers(function: Function, lowering: str) -> None:
    run = compiled(function, lowering=lowering)
    for mine, exact in zip(results(run), results(function, torch.float64), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-5)
    assert run.calls.count("gathered") == 1
    assert {"embedding", "index_select"} & set(run.calls) == set()


@pytest.mark.parametrize("function", [swin, embedding, heads_first, two_indices], ids=lambda f: f.__name__)
def test_a_table_in_half_precision_gets_what_float64_gives_rounded(function: Function) -> None:
    """However often an element is read. Eager's error comes from the bias' gradient as well as from the sum."""
    run = compiled(function, lowering="math")
    *_, mine = results(run, torch.bfloat16)
    *_, again = results(run, torch.bfloat16)

    def on_the_same(*tensors: Tensor) -> Tensor:
        return function(*(x.bfloat16().double() for x in tensors[:4]), tensors[4])

    *_, exact = results(on_the_same, torch.float64)
    *_, eager = results(function, torch.bfloat16)
    assert torch.equal(mine, again)
    errors = [float((x.double() - exact).norm() / exact.norm()) for x in (mine, eager)]
    assert errors[0] <= max(errors[1], 4e-3)


def read_elsewhere(q: Tensor, k: Tensor, v: Tensor, table: Tensor, at: Tensor) -> Tensor:
    """Another gather from the same table, which no bias is made of."""
    return swin(q, k, v, table, at) + table[at[0]].sum()


def padding(q: Tensor, k: Tensor, v: Tensor, table: Tensor, at: Tensor) -> Tensor:
    return sdpa(q, k, v, F.embedding(at, table, padding_idx=R // 2).permute(2, 0, 1)[None])


def of_activations(q: Tensor, k: Tensor, v: Tensor, table: Tensor, at: Tensor) -> Tensor:
    """Elements are made of the table by a product: it is no table of biases."""
    return sdpa(q, k, v, (F.embedding(at, table) @ table.new_ones(H, H)).permute(2, 0, 1)[None])


def few(q: Tensor, k: Tensor, v: Tensor, table: Tensor, at: Tensor) -> Tensor:
    """Fewer elements than the table has: nothing is to be added up."""
    rows = torch.cat([table] * 4)
    return sdpa(q, k, v, rows[torch.arange(S) * 2].T.reshape(1, H, 1, S))


def frozen(q: Tensor, k: Tensor, v: Tensor, table: Tensor, at: Tensor) -> Tensor:
    return swin(q, k, v, table.detach(), at)


@pytest.mark.parametrize(
    ("function", "count"), [(read_elsewhere, 1), (padding, 0), (of_activations, 0), (few, 0), (frozen, 0)]
)
def test_other_gathers_stay(function: Function, count: int) -> None:
    run = compiled(function, lowering="math")
    for mine, exact in zip(results(run), results(function, torch.float64), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-5)
    assert run.calls.count("gathered") == count


def test_a_site_that_is_left_alone_stays_as_it_is() -> None:
    run = compiled(swin, lowering="untouched")
    results(run)
    assert "gathered" not in run.calls


def test_inference_has_no_gradient_to_sum() -> None:
    run = compiled(swin, lowering="math")
    with torch.no_grad():
        run(*given(), index())
    assert "gathered" not in run.calls


def test_a_trained_table_compiles_as_inductor_joins_tensors_on_a_gpu() -> None:
    """Its rewriting is kept for the next process, too."""

    def attention(q: Tensor, k: Tensor, table: Tensor) -> Tensor:
        places = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] + 12
        return sdpa(q, k, k, table[places].permute(2, 0, 1)[None])

    shapes = ((2, 3, 6, 8), (2, 3, 9, 8), (31, 3))
    q, k, table = (torch.randn(shape, requires_grad=True) for shape in shapes)
    attn_compiler.reset()
    run = torch.compile(attention, backend="attn_compiler", options={"lowering": "triton", "strict": True})
    with torch._inductor.config.patch(force_pointwise_cat=True):
        found = torch.autograd.grad(run(q, k, table).sum(), (q, k, table))
    wanted = torch.autograd.grad(attention(q, k, table).sum(), (q, k, table))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    (report,) = attn_compiler.reports()
    assert "not kept" not in report.details()


def test_an_index_may_have_no_axes() -> None:
    """Such as the head of a slope that all heads share."""
    table = torch.randn(1, 2, requires_grad=True)
    torch.library.opcheck(torch.ops.attn_compiler.gathered.default, (table, [torch.tensor(0)]))
