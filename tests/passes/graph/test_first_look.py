"""What is kept of a graph before its attentions are rewritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from attn_compiler import ContextParallel
from attn_compiler.options.options import Options
from attn_compiler.passes import rewrite
from attn_compiler.passes.graph.first_look import SharedGraph
from attn_compiler.passes.graph.unit import Unit
from attn_compiler.torch_private import rank_sync
from tests.passes.context_parallel.compiled import BATCH, LENGTH, WIDTH, Data, Model, causal, fresh_mesh


def _unit(attend: Any, data: Data, **description: Any) -> Unit:
    """Of the graph of a model, rewritten for two ranks."""
    found: list[Unit] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.extend(rewrite(gm, Options(context_parallel=cp, inner="eager", verify=True)).units)
        return gm.forward

    with fresh_mesh() as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_sync, "agree", lambda *_, **__: None)
        cp = ContextParallel(mesh, **description)
        torch.compile(Model(None, attend, None), backend=backend)(torch.randn(BATCH, LENGTH, WIDTH), **data)
    (unit,) = found
    return unit


def _of_text(model: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Data) -> torch.Tensor:
    text = data["text"]
    other = torch.nn.functional.scaled_dot_product_attention(q, model.split(model.k(text)), model.split(model.v(text)))
    return causal(model, q, k, v, data) + other


@pytest.mark.parametrize("method", ["all_gather", "all_to_all", "ring"])
def test_a_site_of_the_model_s_own_graph_knows_what_took_its_place(method: str) -> None:
    unit = _unit(None, {}, method=method)
    assert isinstance(unit.outcome, SharedGraph)
    look = unit.outcome.first_look
    assert look is not None
    (site,) = look.sites
    assert site not in unit.found.sites
    assert site.spec is not None
    assert (site.spec.seqlen_q, site.spec.mask.is_causal) == (LENGTH, True)
    assert list(look.axes.values()) == [1]
    assert look.mirror is not unit.mirror
    assert look.is_shared(site)
    assert look.final is not None
    assert look.new_out(site) in {node.name for node in look.final.nodes}
    assert look.new_out(site) not in {node.name for node in look.original.nodes}


def test_a_site_whose_keys_every_rank_has_was_not_rewritten() -> None:
    unit = _unit(_of_text, {"text": torch.randn(BATCH, 7, WIDTH)}, replicated=("text",))
    assert isinstance(unit.outcome, SharedGraph)
    look = unit.outcome.first_look
    assert look is not None
    assert [look.is_shared(site) for site in look.sites] == [False, True]
