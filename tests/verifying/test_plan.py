from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from attn_compiler.passes.writing import buffers
from attn_compiler.reasons.errors import AttnCompilerWarning
from attn_compiler.verifying import running
from attn_compiler.verifying.plan import Padded
from attn_compiler.verifying.values import Key
from tests.verifying.planning import SHAPE, Tensor, causal, masked, planned, plans, qkv


def with_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_graph_without_attention_has_no_plan() -> None:
    ((plan, _, _),) = plans(torch.sin, torch.randn(3))
    assert plan is None


def test_graph_that_a_pass_failed_on_has_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "install", None)
    with pytest.warns(AttnCompilerWarning):
        ((plan, _, _),) = plans(causal, *qkv(), strict=False)
    assert plan is None


def test_each_site_has_its_checks() -> None:
    plan = planned(lambda q, k, v: causal(causal(q, k, v), k, v) @ v.mT, *qkv()).plan
    assert [check.subject for check in plan.checks] == ["mask", "output", "mask", "output"]
    assert [check.skipped for check in plan.checks] == [None] * 4
    names = {Key(0, node.name) for node in plan.module.graph.nodes}
    assert all(check.needs and check.needs <= names for check in plan.checks)


def test_a_site_without_a_mask_has_one_check() -> None:
    plan = planned(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *qkv()).plan
    assert [check.subject for check in plan.checks] == ["output"]


def test_the_plan_outlives_the_graph() -> None:
    """The compiler is free to do what it likes with the graph that it is given."""
    found = planned(lambda q, k, v: causal(q, k, v) + 1, *qkv())
    for node in reversed(list(found.module.graph.nodes)):
        if node.op != "placeholder":
            node.replace_all_uses_with(next(iter(found.module.graph.nodes)))
            found.module.graph.erase_node(node)
    assert [v.skipped for v in running.run_checks(found.plan, found.args).found] == [None, None]


def test_a_body_outlives_the_graph() -> None:
    inputs = [x.requires_grad_() for x in qkv()]
    found = planned(lambda q, k, v: checkpoint(causal, q, k, v, use_reentrant=False), *inputs)
    (body,) = (module for name, module in found.module.named_modules() if name)
    assert isinstance(body, torch.fx.GraphModule)
    body.graph = torch.fx.Graph()
    assert [v.skipped for v in running.run_checks(found.plan, found.args).found] == [None, None]


def test_outputs_of_a_body_that_is_given_more_than_the_models_own_are_checked() -> None:
    """Its kernel reads which tokens are padding, of which the model hands on no more than a mask."""

    def function(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        return checkpoint(with_mask, q, k, v, real.bool()[:, None, None, :], use_reentrant=False)

    real = torch.ones(SHAPE[0], SHAPE[2], dtype=torch.int64)
    real[1, 4:] = 0
    found = planned(function, *(x.requires_grad_() for x in qkv()), real, lowerings=("triton",))
    assert [list(body.given.values()) for body in found.plan.bodies.values() if body.given] == [[Key(1, "l_real_")]]
    assert [(v.subject, v.skipped) for v in running.run_checks(found.plan, found.args).found] == [
        ("mask", None),
        ("output", None),
    ]


def test_a_node_that_means_something_else_after_the_rewriting_is_not_the_same() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal((q @ q.mT).softmax(-2) @ v, k, v)

    ((body,),) = [planned(function, *qkv()).plan.bodies.values()]
    softmax = [n for n in body.rewritten.nodes if "softmax" in n.name]
    assert softmax
    assert not {n.name for n in softmax} & body.original
    assert {"matmul", "transpose"} & body.original


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, 4, 6, 8))
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys.copy_(k)
        return causal(q * self.weight, self.keys, v)


def test_inputs_that_the_graph_writes_to_are_known() -> None:
    found = planned(Cached(), *qkv())
    written = [x is found_x for x, found_x in zip(found.plan.may_write, [True] * len(found.args), strict=True)]
    by_name = dict(zip([n.name for n in found.plan.module.graph.nodes if n.op == "placeholder"], written, strict=True))
    assert [name for name, is_written in by_name.items() if is_written] == [name for name in by_name if "keys" in name]


def test_a_graph_whose_bodies_are_not_known_may_write_to_anything() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal(checkpoint(torch.sin, q, use_reentrant=False), k, v)

    found = planned(function, *(x.requires_grad_() for x in qkv()))
    assert all(found.plan.may_write)


def test_symbolic_sizes_are_seen_where_they_first_occur() -> None:
    inputs = [*qkv(), torch.ones(2, 6, dtype=torch.int64)]
    for x in inputs[:3]:
        torch._dynamo.mark_dynamic(x, 2)
    torch._dynamo.mark_dynamic(inputs[3], 1)
    plan = planned(masked, *inputs).plan
    names = [symbol for places in plan.symbols.values() for symbol, _ in places]
    assert names
    assert len(names) == len(set(names))


# ---- padding counts for nothing ----------------------------------------------------------------------------------


class _Before(torch.nn.Module):
    def forward(self, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return mask != 0, mask.sum()


REAL = torch.tensor([[1, 0], [1, 1], [0, 1]])


def test_padding_counts_for_nothing_whatever_axes_hold_it() -> None:
    places = {0: (0, 1), 1: (1, 0), 2: (0, 0), 3: (0, 2)}
    padded = Padded(before=fx.symbolic_trace(_Before()), places=places)
    shapes = ((3, 2, 4), (2, 3), (6, 4), (3, 4, 2), (3, 2))
    found = padded.cleared({i: torch.ones(shape) for i, shape in enumerate(shapes)}, [REAL])
    real = REAL.float()
    assert torch.equal(found[0], real[..., None].expand(3, 2, 4))
    assert torch.equal(found[1], real.t())
    assert torch.equal(found[2], real.reshape(6, 1).expand(6, 4))
    assert torch.equal(found[3], real[:, None].expand(3, 4, 2))
    assert torch.equal(found[4], torch.ones(3, 2))


def test_what_is_not_finite_at_padding_counts_for_nothing() -> None:
    padded = Padded(before=fx.symbolic_trace(_Before()), places={0: (0, 1)})
    found = padded.cleared({0: torch.full((3, 2), torch.nan)}, [REAL])
    assert torch.equal(found[0].isnan(), REAL == 1)
