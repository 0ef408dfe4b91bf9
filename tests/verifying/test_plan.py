"""What is checked of a site, across ranks, and where a forward is computed again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from attn_compiler.context_parallel import collectives as torch_collectives
from attn_compiler.context_parallel.layout import Layout
from attn_compiler.passes.writing import buffers
from attn_compiler.reasons.errors import AttnCompilerWarning, VerificationMismatch
from attn_compiler.torch_private import rank_sync
from attn_compiler.torch_private.rank_sync import RanksDisagree
from attn_compiler.verifying import running
from attn_compiler.verifying.plan import Padded
from attn_compiler.verifying.ranks import Ranks, WholeLoads
from attn_compiler.verifying.values import Key, NoValueError, Values
from tests.verifying.planning import LENGTH, SHAPE, Tensor, causal, masked, planned, plans, qkv


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


# What ranks have is put in the order of the sequence, and all raise what one of them found.
def _ranks(*, balanced: bool = False, rank: int = 0, size: int = 3) -> Ranks:
    return Ranks(layout=Layout(size=size, balanced=balanced), rank=rank, group="of nobody")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool, torch.int64])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("balanced", [False, True])
def test_parts_come_back_in_the_order_of_the_sequence(
    monkeypatch: pytest.MonkeyPatch, balanced: bool, axis: int, dtype: torch.dtype
) -> None:
    ranks = _ranks(balanced=balanced)
    shape = [2, 3, 4]
    shape[axis] = 12
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    parts = [ranks.layout.part(whole, axis, rank) for rank in range(3)]
    monkeypatch.setattr(torch_collectives, "parts", lambda x, size, group: torch.stack(parts))
    found = ranks.whole(parts[0], axis)
    assert found.dtype == dtype
    assert torch.equal(found, whole)
    assert torch.equal(whole.index_select(axis, ranks.layout.positions(4, ranks.rank, whole.device)), parts[0])


def _mismatch(what: str) -> VerificationMismatch:
    texts = {"formula": "k <= q", "expected": "1", "observed": "2", "allowed": "0", "differing": "1 of 2"}
    return VerificationMismatch(site="layers.0", what=what, index="[0, 1]", **texts)


def _said(*found: tuple[int, str], rank: int = 0) -> str:
    own = _ranks(rank=rank)
    said: list[str] = []

    def answers(group: str, subject: str, text: str, *, seconds: float) -> list[str]:
        said.append(text)
        return ["[]"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_sync, "answers", answers)
        own.raise_first([(place, _mismatch(what)) for place, what in found])
    return said[0]


def _answered(monkeypatch: pytest.MonkeyPatch, *by_rank: str) -> None:
    def answers(*_: Any, **__: Any) -> list[str]:
        return list(by_rank)

    monkeypatch.setattr(rank_sync, "answers", answers)


def test_the_first_check_of_the_lowest_rank_is_what_all_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    _answered(monkeypatch, "[]", _said((3, "c"), (1, "b"), rank=1), _said((1, "d"), rank=2))
    with pytest.raises(VerificationMismatch) as error:
        _ranks().raise_first([])
    assert (error.value.what, error.value.index) == ("b", "[0, 1] on rank 1")
    assert "compile without context_parallel" in str(error.value)
    assert error.value.__notes__ == [
        "also: the d at layers.0, [0, 1] on rank 2",
        "also: the c at layers.0, [0, 1] on rank 1",
    ]


def test_nothing_is_raised_where_no_rank_found_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(_said()) == []
    _answered(monkeypatch, "[]", "[]")
    _ranks().raise_first([])


def test_a_rank_whose_check_failed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _answered(monkeypatch, "[]", "failed: MemoryError")
    with pytest.raises(RanksDisagree, match="rank 1: failed: MemoryError"):
        _ranks().raise_first([])


def test_what_another_rank_failed_by_is_not_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(rank_sync, "send", lambda group, text: said.append(f"{group}: {text}"))
    ranks = dataclasses.replace(_ranks(), beside=("heads",))
    ranks.failed(RanksDisagree("rank 1: failed"))
    # Those that share heads did not meet that rank.
    assert [text.split(":")[0] for text in said] == ["heads"]
    said.clear()
    ranks.failed(MemoryError("none left"))
    assert [text.split(":")[0] for text in said] == ["of nobody", "heads"]
    assert all("none left" in text for text in said)


def test_what_one_share_of_the_heads_found_is_raised_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    by_group = {"of nobody": ["[]", "[]"], "heads": ["[]", _said((2, "e"), rank=1)]}
    monkeypatch.setattr(rank_sync, "answers", lambda group, *_, **__: by_group[group])
    with pytest.raises(VerificationMismatch, match="the e is not"):
        dataclasses.replace(_ranks(), beside=("heads",)).raise_first([])


# ---- what masks load, of the whole sequence ----------------------------------------------------------------------


BEGINS = torch.tensor([[1, 0, 0, 1, 0, 0], [1, 0, 1, 0, 0, 0]])
AFTER = torch.tensor([[0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 1]])


class _Two(Ranks):
    """Rank 0 of two; the other one has AFTER."""

    def whole(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        assert torch.equal(x, BEGINS)
        return torch.cat((x, AFTER), axis)


def _documents(q: Tensor, k: Tensor, v: Tensor, begins: Tensor, table: Tensor) -> Tensor:
    documents = begins.cumsum(-1)
    return F.scaled_dot_product_attention(q, k, v, documents[:, None, :, None] == documents[:, None, None])


def _first_keys(q: Tensor, k: Tensor, v: Tensor, begins: Tensor, table: Tensor) -> Tensor:
    kept = torch.arange(LENGTH) <= table[:, None, None, None]
    return F.scaled_dot_product_attention(q, k, v, kept) * begins.sum()


def _whole_loads(function: Callable[..., Tensor]) -> tuple[WholeLoads, Values, Tensor]:
    table = torch.tensor([3, 4])
    found = planned(function, *qkv(), BEGINS, table)
    check = found.check("output")
    nodes = {node.name: node for node in found.plan.module.graph.nodes}
    (begins,) = (name for name in nodes if "begins" in name)
    whole = WholeLoads(body=check.body, nodes=nodes, axes={begins: 1})
    values = Values(bodies=found.plan.mirrors)
    (version,) = (check.site.loads[name] for name in check.site.condition.facts.tensors)  # type: ignore[union-attr]
    known = dict(zip(found.plan.inputs, found.args, strict=True))
    ranks = _Two(layout=Layout(size=2, balanced=False), rank=0, group="")
    for key in values.needs(lambda asked: whole.value(version, asked, ranks)):
        values.recorded[key] = next((x for name, x in known.items() if name in key.name), table)
    return whole, values, whole.value(version, values, ranks)


def test_sums_along_the_sequence_go_on_from_one_rank_to_the_next() -> None:
    _, _, found = _whole_loads(_documents)
    assert torch.equal(found, torch.cat((BEGINS, AFTER), 1).cumsum(-1))
    assert not torch.equal(found, torch.cat((BEGINS.cumsum(-1), AFTER.cumsum(-1)), 1))


def test_what_every_rank_has_is_taken_as_it_is() -> None:
    _, _, found = _whole_loads(_first_keys)
    assert found.tolist() == [3, 4]


def test_what_is_not_in_the_model_s_own_graph_has_no_value() -> None:
    found = planned(_documents, *qkv(), BEGINS, torch.tensor([3, 4]))
    check = found.check("output")
    (version,) = (check.site.loads[name] for name in check.site.condition.facts.tensors)  # type: ignore[union-attr]
    whole = WholeLoads(body=check.body, nodes={}, axes={})
    with pytest.raises(NoValueError, match="not in the model's own graph"):
        whole.value(
            version, Values(bodies=found.plan.mirrors), Ranks(layout=Layout(size=1, balanced=False), rank=0, group="")
        )
