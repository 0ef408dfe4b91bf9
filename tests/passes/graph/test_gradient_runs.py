"""What autograd saves of a few nodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from attn_compiler.passes.graph import gradient_runs, unit as units_of
from attn_compiler.torch_private import tracing as torch_tracing
from tests.passes.compiling import captured, mark

Tensor = torch.Tensor
SHAPE = (2, 4, 6, 8)


def learned(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).softmax(-1) @ v


def saved_inputs(function: Callable[..., Any], *inputs: Tensor) -> set[str]:
    """The names of the inputs whose memory autograd saves for the function."""
    gm, _ = captured(function, *inputs)
    mode = torch_tracing.fake_mode_of_values(units_of.examples(gm))
    assert mode is not None
    nodes = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    found = gradient_runs.run_on_fakes(nodes, mode)
    assert found is not None
    return {str(n.name).strip("l_") for n in gm.graph.nodes if n.op == "placeholder" and found.saves(n)}


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (attend, {"q", "k", "v"}),
        (lambda q, k, v: attend(q * 2, k, v), {"k", "v"}),
        (lambda q, k, v: attend(q.transpose(1, 2).contiguous().transpose(1, 2), k, v), {"k", "v"}),
        (lambda q, k, v: attend(q.detach(), k, v), {"q", "v"}),
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), {"q", "k", "v"}),
        (lambda q, k, v: attend(q, k.view(SHAPE), v), {"q", "k", "v"}),
    ],
    ids=["products", "scaled", "copied by the product", "without a gradient of q", "a kernel", "a view"],
)
def test_what_the_model_saves(function: Callable[..., Any], names: set[str]) -> None:
    assert saved_inputs(function, *learned(SHAPE, SHAPE, SHAPE)) == names


def test_a_mask_is_saved_where_it_chooses_and_not_where_it_is_added() -> None:
    q = torch.randn(SHAPE, requires_grad=True)
    scores, mask = torch.randn(2, 4, 6, 6, requires_grad=True), torch.randn(6, 6)
    assert saved_inputs(lambda x, m: x + m, scores, mask) == set()
    assert saved_inputs(lambda x, m: torch.where(m, x, 0.0), scores, mask > 0) == {"m"}
    assert "m" in saved_inputs(lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m), q, mask)


def test_what_can_not_be_run_is_not_known() -> None:
    """Then nothing counts as saved by the model, and everything as saved by a kernel."""
    gm, _ = captured(lambda x: x + 1, torch.randn(3, requires_grad=True))
    mode = torch_tracing.fake_mode_of_values(units_of.examples(gm))
    assert mode is not None
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor) or [
        n for n in gm.graph.nodes if n.op == "call_function"
    ]
    node.args = (*node.args, "no third one", "nor a fourth")
    assert gradient_runs.run_on_fakes([node], mode) is None


@pytest.mark.parametrize("dynamic", [(), (0, 2)], ids=["known", "symbolic"])
def test_alike_sites_are_run_once(dynamic: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first and the third site the keys are not saved: the product copies them. The second one is alike but for that."""

    def three(a: Tensor, b: Tensor, c: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return attend(a * 2, a.mT.contiguous().mT, v), attend(b * 2, b, v), attend(c * 2, c.mT.contiguous().mT, v)

    gm, _ = captured(three, *(mark(x, dynamic) for x in learned(SHAPE, SHAPE, SHAPE, SHAPE)))
    mode = torch_tracing.fake_mode_of_values(units_of.examples(gm))
    assert mode is not None
    calls = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    ends = [0, *(i + 1 for i, n in enumerate(calls) if "matmul" in str(n.target) and "softmax" in str(n.args[0]))]
    sites = [calls[i:j] for i, j in itertools.pairwise(ends)]
    assert len(sites) == 3
    ran: list[int] = []
    run = gradient_runs._run

    def watched(nodes: Any, mode: Any) -> Any:
        ran.append(len(nodes))
        return run(nodes, mode)

    plain = [gradient_runs.run_on_fakes(nodes, mode) for nodes in sites]
    monkeypatch.setattr(gradient_runs, "_run", watched)
    known: dict[Any, gradient_runs.AlikeRun] = {}
    for one, other in zip([gradient_runs.run_on_fakes(nodes, mode, known) for nodes in sites], plain, strict=True):
        assert one is not None
        assert other is not None
        assert [one.saves(n) for n in gm.graph.nodes] == [other.saves(n) for n in gm.graph.nodes]
    assert len(ran) == 2


def test_hooks_of_others_see_nothing() -> None:
    """A checkpoint around compiled code counts what is saved."""
    seen: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        x = torch.randn(3, requires_grad=True)
        found = torch_tracing.saved_for_backward(lambda: x.exp())
    assert len(found) == 1
    assert not seen
