"""Bodies of checkpoints are written into the graph that calls them, and made again: what is computed, and recomputed, is the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from attn_compiler.passes.graph import bodies
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.passes.spelling import checkpoints
from attn_compiler.passes.spelling.checkpoints import Inlined

Change = Callable[[fx.GraphModule, list[Inlined]], None]


def _calls(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if bodies.is_higher_order(node)]


def _targets(gm: fx.GraphModule) -> list[str]:
    return [target_name(node) for node in gm.graph.nodes if node.op.startswith("call_")]


class There:
    """A backend that writes bodies into the graph, and takes them out again. graphs: what there was before, between and after."""

    def __init__(self, change: Change | None = None) -> None:
        self.change = change
        self.graphs: list[list[str]] = []
        self.bodies: list[list[str]] = []
        self.gm: fx.GraphModule

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> Any:
        self.gm = gm
        self._note(gm)
        found = checkpoints.inline(gm)
        self._note(gm)
        if self.change is not None:
            self.change(gm, found)
        checkpoints.outline(gm, found)
        gm.graph.lint()
        self._note(gm)
        return gm

    def _note(self, gm: fx.GraphModule) -> None:
        self.graphs.append(_targets(gm))
        self.bodies.append([name for call in _calls(gm) for body in bodies.bodies(call) for name in _targets(body)])


def _gradients(function: Callable[..., Any], *given: Tensor) -> tuple[Tensor, list[Tensor]]:
    leaves = [x.clone().requires_grad_() for x in given]
    out = function(*leaves)
    out.square().sum().backward()
    return out.detach(), [x.grad for x in leaves if x.grad is not None]


def _through(function: Callable[..., Any], *, change: Change | None = None) -> There:
    """Compile, and compare with what is not compiled."""
    torch._dynamo.reset()
    there, x, y = There(change), torch.randn(3, 4), torch.randn(3, 4)
    out, gradients = _gradients(function, x, y)
    mine, own = _gradients(torch.compile(function, backend=there, fullgraph=True), x, y)
    torch.testing.assert_close(mine, out, rtol=0, atol=0)
    torch.testing.assert_close(own, gradients, rtol=0, atol=0)
    return there


def _part(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.T).exp() @ y


def _two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    z = x * y
    return z.sin(), z


def _given_back(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, (x + y).cos()


def _in_autocast(x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ y.T).float()


def _without_grad(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        z = y.exp()
    return x * z


def _once(function: Callable[..., Any], **given: Any) -> Callable[..., Any]:
    return functools.partial(checkpoint, function, **({"use_reentrant": False} | given))


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "one": lambda x, y: _once(_part)(x, y) + 1,
    "reentrant": lambda x, y: _once(_part, use_reentrant=True)(x, y) + 1,
    "one after the other": lambda x, y: _once(_part)(_once(_part)(x, y).tanh(), y),
    "two results": lambda x, y: torch.add(*_once(_two)(x, y)),
    "one of two results": lambda x, y: _once(_two)(x, y)[1],
    "an input given back": lambda x, y: torch.mul(*_once(_given_back)(x, y)),
    "autocast inside": lambda x, y: _once(_in_autocast)(x, y).sin(),
    "no gradient inside": lambda x, y: _once(_without_grad)(x, y).sin(),
    "beside others": lambda x, y: _once(_part)(x.sin(), y) + x.cos() @ y.T @ y,
    "the whole function": lambda x, y: _once(_part)(x, y),
}


@pytest.mark.parametrize("name", FORMS)
def test_there_and_back(name: str) -> None:
    there = _through(FORMS[name])
    before, between, after = there.graphs
    assert not any("checkpoint" in target for target in between)
    assert [target for target in after if target != "getitem"] == [target for target in before if target != "getitem"]
    assert there.bodies[1] == []
    assert there.bodies[2] == there.bodies[0]
    assert not [name for name, _ in there.gm.named_modules() if "mark" in name]


def test_how_it_is_recomputed_stays_the_models_choice() -> None:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.exp.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    torch._dynamo.reset()
    there = There()
    x = torch.randn(3, 4, requires_grad=True)
    torch.compile(lambda x: _once(_part, context_fn=contexts)(x, x), backend=there, fullgraph=True)(x)
    (call,) = _calls(there.gm)
    (body,) = bodies.bodies(call)
    assert body.meta["_checkpoint_context_fn"].args == (policy,)
    assert call.kwargs == {"use_reentrant": False}
    assert body.graph.output_node().args[0] is not None


def test_a_checkpoint_in_a_checkpoint_stays_a_call() -> None:
    def outer(x: Tensor, y: Tensor) -> Tensor:
        return checkpoint(_part, x.sin(), y, use_reentrant=False)  # type: ignore[no-any-return]

    there = _through(lambda x, y: _once(outer)(x, y) + 1)
    assert sum("checkpoint" in target for target in there.graphs[1]) == 1
    assert there.graphs[2] == there.graphs[0]


def _add(gm: fx.GraphModule, before: fx.Node, *given: fx.Node) -> fx.Node:
    """A node of a pass, which adds up what it is given."""
    with gm.graph.inserting_before(before):
        made = gm.graph.call_function(torch.add, (given[0], given[-1]))
    with torch.no_grad():
        made.meta["example_value"] = given[0].meta["example_value"].detach() + given[-1].meta["example_value"].detach()
    return made


def _inside(gm: fx.GraphModule, one: Inlined, name: str) -> fx.Node:
    (found,) = [node for node in one.nodes if target_name(node) == name]
    return found


def test_what_is_made_of_tensors_around_it_goes_before_the_first_call() -> None:
    """A mask for two layers, say: it is neither recomputed nor kept twice."""

    def change(gm: fx.GraphModule, found: list[Inlined]) -> None:
        x, _ = gm.graph.find_nodes(op="placeholder")
        made = _add(gm, _inside(gm, found[0], "exp"), x, x)
        for one in found:
            exp = _inside(gm, one, "exp")
            with gm.graph.inserting_after(exp):
                sized = gm.graph.call_function(torch.Tensor.size, (made, 0))
            sized.meta["example_value"] = 3

    there = _through(lambda x, y: _once(_part)(_once(_part)(x, y).tanh(), y), change=change)
    assert there.graphs[2].index("add") < there.graphs[2].index("tag_activation_checkpoint")
    assert "add" not in there.bodies[2]
    assert there.bodies[2].count("size") == 2


def test_what_is_made_of_the_body_is_a_further_result_where_it_is_used_outside() -> None:
    def change(gm: fx.GraphModule, found: list[Inlined]) -> None:
        exp = _inside(gm, found[0], "exp")
        (out,) = gm.graph.output_node().all_input_nodes
        out.args = (out.args[0], _add(gm, next(iter(exp.users)), exp, exp))
        with gm.graph.inserting_before(out):
            zero = gm.graph.call_function(torch.mul, (out.args[1], 0))
            zero.meta["example_value"] = out.args[1].meta["example_value"]  # type: ignore[union-attr]
            total = gm.graph.call_function(torch.sum, (zero,))
            total.meta["example_value"] = zero.meta["example_value"].sum()
        out.args = (out.args[0], total)

    there = _through(lambda x, y: _once(_part)(x, y) + 0, change=change)
    (call,) = _calls(there.gm)
    assert len(call.meta["example_value"]) == 2
    assert "add" in there.bodies[2]


def test_nothing_is_moved_out_of_autocast() -> None:
    def change(gm: fx.GraphModule, found: list[Inlined]) -> None:
        x, _ = gm.graph.find_nodes(op="placeholder")
        made = _add(gm, _inside(gm, found[0], "matmul"), x, x)
        with gm.graph.inserting_after(made):
            sized = gm.graph.call_function(torch.Tensor.size, (made, 0))
        sized.meta["example_value"] = 3

    there = _through(FORMS["autocast inside"], change=change)
    assert "add" in there.bodies[2]


def test_a_number_that_is_used_outside_is_an_error() -> None:
    def change(gm: fx.GraphModule, found: list[Inlined]) -> None:
        exp = _inside(gm, found[0], "exp")
        with gm.graph.inserting_after(exp):
            sized = gm.graph.call_function(torch.Tensor.size, (exp, 0))
        sized.meta["example_value"] = 3
        (out,) = gm.graph.output_node().all_input_nodes
        out.args = (out.args[0], sized)

    with pytest.raises(Exception, match="is a tensor"):
        _through(lambda x, y: _once(_part)(x, y) + 3, change=change)
