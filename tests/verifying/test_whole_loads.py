"""What a mask loads is made of the whole inputs: as one process would have it, and not put together of what ranks made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from attn_compiler.context_parallel.layout import Layout
from attn_compiler.verifying.ranks import Ranks
from attn_compiler.verifying.values import NoValueError, Values
from attn_compiler.verifying.whole_loads import WholeLoads
from tests.verifying.planning import LENGTH, Tensor, planned, qkv

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


def _loaded(function: Callable[..., Tensor]) -> tuple[WholeLoads, Values, Tensor]:
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
    _, _, found = _loaded(_documents)
    assert torch.equal(found, torch.cat((BEGINS, AFTER), 1).cumsum(-1))
    assert not torch.equal(found, torch.cat((BEGINS.cumsum(-1), AFTER.cumsum(-1)), 1))


def test_what_every_rank_has_is_taken_as_it_is() -> None:
    _, _, found = _loaded(_first_keys)
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
