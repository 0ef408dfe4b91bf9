"""What autograd saves of a few nodes, who may write to a tensor after a site, and which copies follow from that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from attn_compiler.options.options import Options
from attn_compiler.passes.graph import saved, unit as units_of
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.unit import Unit, UnitPlace
from attn_compiler.torch_private import tracing as torch_tracing
from tests.passes.compiling import captured, compiled

aten = torch.ops.aten
SHAPE, FEW = (2, 4, 6, 8), (2, 2, 6, 8)


def learned(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).softmax(-1) @ v


# ---- who may write --------------------------------------------------------------------------------------------------


def danger(function: Callable[..., Any], *inputs: Tensor) -> saved.Danger | None:
    """Who may write to what `sin` gives, or to the argument of `cos`, after the last softmax."""
    gm, mirror = captured(function, *inputs)
    mode = torch_tracing.fake_mode_of_values(units_of.examples(gm))
    assert mode is not None
    unit = Unit.of(gm, Options(), UnitPlace(name="", mode=mode))
    unit.mirror = mirror
    nodes = {n.target: n for n in mirror.graph.nodes}
    node = nodes.get(aten.sin.default) or nodes[aten.cos.default].all_input_nodes[0]
    return saved.danger_after(unit, mirror, node, nodes[aten.softmax.int])


def test_nobody() -> None:
    assert danger(lambda x: x.sin().softmax(-1).exp(), torch.randn(3)) is None


def test_a_later_node_of_the_graph() -> None:
    def function(x: Tensor) -> Tensor:
        made = x.sin()
        out = made.softmax(-1)
        made[:1].add_(1)
        return out

    found = danger(function, torch.randn(3))
    assert found == saved.Danger(why="add_ writes to it afterwards")


def test_not_an_earlier_one() -> None:
    def function(x: Tensor) -> Tensor:
        made = x.sin()
        made.add_(1)
        return made.softmax(-1).exp()

    assert danger(function, torch.randn(3)) is None


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.view(-1), lambda x: x[1:]])
def test_who_gets_it_back(view: Callable[[Tensor], Tensor]) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        made = x.sin()
        return made.softmax(-1), view(made)

    found = danger(function, torch.randn(3))
    assert found is not None
    assert found.by_user
    assert "returns" in found.why


def test_who_gave_it() -> None:
    found = danger(lambda x: x.view(3).cos().softmax(-1), torch.randn(3))
    assert found is not None
    assert found.by_user
    assert "given" in found.why


@pytest.mark.parametrize("writes", [False, True])
def test_a_parameter_is_written_to_only_by_the_graph(writes: bool) -> None:
    parameter = torch.nn.Parameter(torch.randn(3))

    def function(x: Tensor) -> Tensor:
        if writes:
            with torch.no_grad():
                parameter.mul_(2)
        return (parameter.cos() + x).softmax(-1).exp()

    assert (danger(function, torch.randn(3)) is None) == (not writes)


# ---- the copies -----------------------------------------------------------------------------------------------------


def copies(function: Callable[..., Any], *inputs: Tensor, lowering: str = "reference") -> dict[str, int | None]:
    run = compiled(function, lowering=lowering)
    run(*inputs)
    return {c.operand: c.bytes for site in run.report.sites for c in site.copies if c.why.endswith("backward reads it")}


def test_a_copy_has_the_bytes_of_what_is_read_and_not_of_what_the_model_makes() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k.repeat_interleave(2, 1), v[:, :1].expand(-1, 4, -1, -1).clone()).exp()

    elements = 2 * 2 * 6 * 8
    assert copies(function, *learned(SHAPE, FEW, FEW)) == {"k": elements * 4, "v": elements * 4 // 2}


@pytest.mark.parametrize("returns", [True, False])
def test_copies_of_keys_that_are_returned_have_a_remedy(returns: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        kept = k.sin()
        out = attend(q.sin(), kept.repeat_interleave(2, 1), v.sin().repeat_interleave(2, 1))
        return (out.exp(), *((kept,) if returns else ()))

    run = compiled(function, lowering="reference")
    run(*learned(SHAPE, FEW, FEW))
    assert [copy.operand for copy in run.site.copies if copy.remedy is not None] == ["k"] * returns
    assert ["use_cache=False" in remedy for remedy in run.site.remedies] == [True] * returns


def test_bytes_of_symbolic_sizes_are_not_known() -> None:
    run = compiled(lambda q, k: attend(q * 2, k, k).exp(), dynamic=True, lowering="reference")
    run(*learned(SHAPE, SHAPE))
    assert [copy.bytes for copy in run.site.copies if copy.operand == "q"] == [None]


def test_what_two_sites_read_is_copied_once() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        for _ in range(3):
            q = (q @ k.mT * 0.3 + mask).softmax(-1) @ v
        return q.exp()

    run = compiled(function, lowering="reference")
    run(*learned(SHAPE, SHAPE, SHAPE), torch.randn(6, 6))
    assert run.calls.count("held") == 1
    assert all("mask" in [copy.operand for copy in site.copies] for site in run.report.sites)


def test_what_is_written_to_between_two_sites_is_copied_for_each() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        q = (q @ k.mT * 0.3 + mask).softmax(-1) @ v
        mask.add_(1)
        return ((q @ k.mT * 0.3 + mask).softmax(-1) @ v).exp()

    run = compiled(function, lowering="reference")
    run(*learned(SHAPE, SHAPE, SHAPE), torch.randn(6, 6))
    assert run.calls.count("held") == 2


def test_what_the_kernel_does_not_save_is_not_copied() -> None:
    """Plain products save neither a mask that is added nor what they give; a CPU's kernel makes a mask of numbers of truth values."""

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT * 0.3 + mask).softmax(-1) @ v

    def called(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=kept)

    inputs = learned(SHAPE, SHAPE, SHAPE)
    assert copies(function, *inputs, torch.randn(6, 6), lowering="math") == {}
    kept = torch.ones(6, 6, dtype=torch.bool).tril()[None, None] | (torch.rand(2, 1, 6, 6) > 0.5)
    assert copies(called, *inputs, kept, lowering="sdpa_cpu_flash") == {}
    assert copies(called, *inputs, kept, lowering="reference").keys() == {"mask"}


def test_without_gradients_nothing_is_copied() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = attend(q * 2, k, v)
        k.zero_()
        return out, v

    run = compiled(function, lowering="reference")
    with torch.no_grad():
        run(*learned(SHAPE, SHAPE, SHAPE))
    assert "held" not in run.calls


# ---- bodies ---------------------------------------------------------------------------------------------------------


def body_danger(function: Callable[..., Any], *inputs: Tensor) -> str | None:
    """Why the first operand of the site in a checkpoint's body needs a copy."""
    found: list[str | None] = []
    settle = saved.record_copies

    def record(unit: Unit, mirror: Any, match: Any) -> None:
        settle(unit, mirror, match)
        found.append(match.k.kept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved, "record_copies", record)
        compiled(function, lowering="reference")(*inputs)
    (why,) = found
    return why


@pytest.mark.parametrize("place", ["nowhere", "before", "after", "in a later body"])
def test_writes_of_the_graph_that_calls_a_body(place: str) -> None:
    def age(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.exp()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k + 1
        if place == "before":
            k.mul_(2)
        out = checkpoint(lambda q, k, v: attend(q, k * 0.5, v), q, k, v, use_reentrant=False)
        if place == "after":
            k.mul_(2)
        if place == "in a later body":
            out = out + checkpoint(age, k.detach(), use_reentrant=False)
        return out

    why = body_danger(function, *learned(SHAPE, SHAPE, SHAPE))
    assert (why is not None) == (place in ("after", "in a later body"))


def test_a_body_that_is_called_in_no_known_way() -> None:
    """What it is given may be written to by whoever calls it; what it makes itself may not."""
    gm, mirror = captured(lambda x: (x.cos().softmax(-1), x.sin().exp()), torch.randn(3))
    mode = torch_tracing.fake_mode_of_values(units_of.examples(gm))
    assert mode is not None
    unit = Unit.of(gm, Options(), UnitPlace(name="body", mode=mode))
    unit.mirror = mirror
    nodes = {n.target: n for n in mirror.graph.nodes}
    given, made = (
        saved.danger_after(unit, mirror, n, nodes[aten.softmax.int]) for n in (_input(mirror), nodes[aten.sin.default])
    )
    assert given is not None
    assert not given.by_user
    assert made is None


def _input(mirror: Mirror) -> fx.Node:
    return next(n for n in mirror.graph.nodes if n.op == "placeholder")


@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
def test_a_view_of_the_output_may_be_written_to_before_the_backward(inner: str) -> None:
    """The model saves its weights and not the output, the kernel its output: Inductor leaves out a clone whose view is returned."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v).squeeze(1)

    given = [torch.randn(2, 1, 48, 16, requires_grad=True) for _ in range(3)]
    upstream = torch.randn(2, 48, 16)
    found = []
    for function in (attention, compiled(attention, inner=inner, lowering="triton")):
        out = function(*given)
        with torch.no_grad():
            out.detach().mul_(3.0)
        found.append(torch.autograd.grad(out, given, upstream))
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
