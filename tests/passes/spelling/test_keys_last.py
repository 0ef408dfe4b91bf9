"""Softmaxes over another axis than the last: left to Inductor, but in a form that its attention patterns don't take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.passes.spelling import keys_last
from attn_compiler.torch_private.tracing import fake_mode_of_values
from tests.passes.compiling import CPU_FLASH, captured, compiled

B, H, S, D = 2, 4, 6, 8


def _inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, S, D, generator=generator, requires_grad=True) for _ in range(3)]


def _over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(torch.matmul(q, k.transpose(-2, -1)).div(D**0.5).softmax(dim=-2), v)


SPELLINGS: list[Callable[[Tensor], Tensor]] = [
    lambda s: s.softmax(-2),
    lambda s: s.softmax(dim=2),
    lambda s: torch.softmax(s, -2),
    lambda s: F.softmax(s, dim=-2, dtype=torch.float64).float(),
    lambda s: torch.nn.Softmax(dim=-3)(s),
    lambda s: F.softmax(input=s, dim=1),
    lambda s: torch.softmax(dim=2, input=s),
    lambda s: torch.softmax(x=s, axis=1),
    lambda s: s.softmax(axis=-2),
    lambda s: F.softmax(dtype=torch.float64, dim=1, input=s).float(),
    lambda s: F.dropout(s.softmax(1), 0.1, training=False).view(B, H, S, S),
]


@pytest.mark.parametrize("softmax", SPELLINGS)
def test_every_spelling_gives_the_same_numbers_and_gradients(softmax: Callable[[Tensor], Tensor]) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax(q @ k.mT) @ v

    eager, own = _inputs(), _inputs()
    run = compiled(function)
    wanted, got = function(*eager), run(*own)
    torch.testing.assert_close(got, wanted)
    grads = [torch.autograd.grad(out.sin().sum(), inputs) for out, inputs in ((got, own), (wanted, eager))]
    torch.testing.assert_close(*grads)
    assert CPU_FLASH not in run.calls
    assert run.report.num_misses == 1


def _moved(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    mode = fake_mode_of_values(n.meta.get("example_value") for n in gm.graph.nodes)
    assert mode is not None
    return list(keys_last.put_keys_last(gm, mode).values())


@pytest.mark.parametrize("softmax", SPELLINGS)
def test_the_softmax_runs_over_the_last_axis_then(softmax: Callable[[Tensor], Tensor]) -> None:
    gm, _ = captured(lambda q, k, v: softmax(q @ k.mT) @ v, *_inputs())
    (node,) = _moved(gm)
    gm.graph.lint()
    assert node.target is torch.ops.aten.softmax.int
    assert node.args[1] == -1
    assert node.meta["example_value"].requires_grad
    assert _moved(gm) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: F.softmax(q @ k.mT, -1) @ v,
        lambda q, k, v: F.softmax(q, 1) + k + v,
        lambda q, k, v: F.softmax(q[0, 0, 0], 0) @ v.mT,
    ],
)
def test_others_are_left_as_they_are(function: Callable[..., Tensor]) -> None:
    gm, _ = captured(function, *_inputs())
    before = gm.code
    assert _moved(gm) == []
    assert gm.code == before


def test_in_autocast() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return _over_queries(q, k, v)

    run = compiled(function)
    torch.testing.assert_close(run(*_inputs()), function(*_inputs()), atol=2e-2, rtol=2e-2)


@pytest.mark.slow
def test_right_with_inductor_whose_own_patterns_go_wrong() -> None:
    inputs = [t.detach() for t in _inputs()]
    wanted = _over_queries(*inputs)
    torch.testing.assert_close(compiled(_over_queries, inner="inductor")(*inputs), wanted)
    torch._dynamo.reset()
    theirs = torch.compile(_over_queries)(*inputs)
    if torch.allclose(theirs, wanted, atol=1e-4):
        pytest.skip(f"Inductor gives the right result in torch {torch.__version__}")
    assert (theirs - wanted).abs().max() > 0.01
