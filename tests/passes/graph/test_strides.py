"""What comes after a site may rely on the strides that the model's own output had."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.passes.compiling import CPU_FLASH, Compiled, compiled, mark

B, H, S, D = 2, 4, 6, 8
Tensor = torch.Tensor
sdpa = F.scaled_dot_product_attention


def _heads(x: Tensor) -> Tensor:
    """(B, S, H·D) -> (B, H, S, D), strided as every model has it: kernels answer in the same order."""
    return x.unflatten(-1, (H, D)).transpose(1, 2)


def _written_out(x: Tensor) -> Tensor:
    # Made in the graph: x itself could be written to by the user.
    heads = _heads(x.sin())
    return F.softmax(heads @ heads.mT * 0.25, -1) @ heads


def _check(function: Callable[[Tensor], Tensor], *, grad: bool = False) -> Compiled:
    generator = torch.Generator().manual_seed(0)
    eager = torch.randn(B, S, H * D, generator=generator, requires_grad=grad)
    own = eager.detach().clone().requires_grad_(grad)
    run = compiled(function)
    wanted, got = function(eager), run(own)
    torch.testing.assert_close(got, wanted)
    assert got.stride() == wanted.stride()
    if grad:
        wanted.sin().sum().backward()
        got.sin().sum().backward()
        torch.testing.assert_close(own.grad, eager.grad)
    assert CPU_FLASH in run.calls
    return run


def _copies(run: Compiled) -> list[str]:
    return [copy.operand for copy in run.site.copies]


@pytest.mark.in_turns
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "after",
    [
        lambda out: out.view(B, -1),
        lambda out: out.view(B * H, S, D).sum(1),
        lambda out: torch.as_strided(out, (B, H), (H * S * D, S * D)),
        lambda out: out,
        lambda out: out.transpose(1, 2),
        lambda out: (out, 1)[0].unsqueeze(0),
    ],
    ids=["view", "view of heads", "as_strided", "output", "transposed output", "unsqueezed output"],
)
def test_who_relies_on_strides_gets_them(after: Callable[[Tensor], Tensor], grad: bool) -> None:
    run = _check(lambda x: after(_written_out(x)), grad=grad)
    assert _copies(run) == ["out"]
    (copy,) = run.site.copies
    assert copy.bytes == B * H * S * D * 4
    assert copy.why.endswith("needs the strides that the model made")


@pytest.mark.in_turns
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "after",
    [
        lambda out: out.transpose(1, 2).reshape(B, S, H * D) @ torch.ones(H * D, 3),
        lambda out: out.transpose(1, 2).contiguous().view(B, S, H * D).cos(),
        lambda out: out.permute(0, 2, 1, 3).flatten(2).sum(-1),
        lambda out: out.sum(),
        lambda out: out.transpose(1, 2).reshape(B, S, H * D).relu() + 1,
    ],
    ids=["projection", "contiguous view", "flatten and sum", "sum", "elementwise"],
)
def test_who_does_not_rely_on_them_gets_no_copy(after: Callable[[Tensor], Tensor], grad: bool) -> None:
    run = _check(lambda x: after(_written_out(x)), grad=grad)
    assert _copies(run) == []


def test_strides_that_are_the_same_anyway_cost_nothing() -> None:
    run = compiled(lambda q: F.softmax(q @ q.mT, -1) @ q)
    q = torch.randn(B, H, S, D)
    assert run(q).stride() == q.stride()
    assert _copies(run) == []


def test_symbolic_strides() -> None:
    def function(x: Tensor) -> Tensor:
        return _written_out(x).view(x.size(0), H, -1)

    run = compiled(function)
    for length in (S, S + 3):
        x = torch.randn(B, length, H * D)
        got = run(mark(x, [length]))
        torch.testing.assert_close(got, function(x))
        assert got.stride() == function(x).stride()
    assert len(run.reports) == 1
    assert _copies(run) == ["out"]
    (copy,) = run.site.copies
    assert copy.bytes is None


def test_output_that_is_written_to_afterwards() -> None:
    """The backward of a kernel reads its output: it must not be the tensor that the model writes into."""

    def function(x: Tensor) -> Tensor:
        out = _written_out(x)
        out.mul_(2)
        return out.sin()

    run = _check(function, grad=True)
    assert _copies(run) == ["out"]


@pytest.mark.parametrize("function", [_written_out, lambda x: sdpa(*[_heads(x)] * 3)], ids=["written out", "sdpa"])
def test_reshape_that_becomes_a_view_of_what_is_written_to(function: Callable[[Tensor], Tensor]) -> None:
    """In the model the reshape copies, so the write below does not reach the output."""

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        out = function(x)
        merged = out.transpose(1, 2).reshape(B, S, H * D)
        merged.add_(1.0)
        return merged, out

    x = torch.randn(B, S, H * D)
    run = compiled(model)
    torch.testing.assert_close(run(x), model(x))


@pytest.mark.parametrize("also_returned", [False, True])
def test_a_contiguous_that_becomes_a_view_of_what_the_user_writes_to(also_returned: bool) -> None:
    """Written out, `contiguous` copies; of a kernel's own output, which the backward reads, it would be the output itself."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        out = _written_out(x)
        rows = out.transpose(1, 2).contiguous().transpose(1, 2)
        return (rows, out) if also_returned else (rows,)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, S, H * D, generator=generator)
    upstream = torch.randn(B, H, S, D, generator=generator)
    found = []
    run = compiled(function)
    for call in (function, run):
        own = x.clone().requires_grad_()
        outputs = call(own)
        with torch.no_grad():
            outputs[0].add_(1)
        outputs[-1].backward(upstream)
        found.append([*(out.detach() for out in outputs), own.grad])
    torch.testing.assert_close(found[1], found[0])


def test_without_gradients_nothing_reads_an_output_again() -> None:
    def function(x: Tensor) -> Tensor:
        return _written_out(x).transpose(1, 2).contiguous()

    run = compiled(function)
    with torch.no_grad():
        torch.testing.assert_close(run(torch.ones(B, S, H * D)), function(torch.ones(B, S, H * D)))
    assert _copies(run) == []
