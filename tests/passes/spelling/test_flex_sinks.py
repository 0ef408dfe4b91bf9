"""Attention sinks that a model applies with FlexAttention's logsumexp: the call becomes a site with sinks, or stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from attn_compiler.passes.graph import mirror
from attn_compiler.passes.matching.patterns import softmax_chain, softmaxes
from attn_compiler.passes.spelling import flex
from tests.passes.compiling import Compiled, captured, compiled, mark
from tests.passes.spelling.test_flex import check

B, H, HKV, S, D = 2, 4, 2, 24, 16
Function = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("unfused")


def _causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def attended(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention by FlexAttention, and the logsumexp of its scores."""
    block_mask = create_block_mask(_causal, None, None, q.shape[2], k.shape[2], device="cpu")
    out, aux = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True, return_aux=AuxRequest(lse=True))  # type: ignore[misc]
    return out, aux.lse  # type: ignore[return-value]


def as_transformers_does(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """The lines of transformers/integrations/flex_attention.py."""
    out, lse = attended(q, k, v)
    lse = lse.to(v.dtype)
    batch, heads, length, _ = out.shape
    column = sinks.view(1, -1, 1, 1).expand(batch, heads, length, 1)
    lse_expanded = lse.unsqueeze(-1)
    combined = torch.logsumexp(torch.cat([lse_expanded, column], dim=-1), dim=-1, keepdim=True)
    out = out * torch.exp(lse_expanded - combined)
    return out.to(q.dtype).transpose(1, 2).contiguous()


def by_sigmoid(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """As torchtitan's gpt-oss does."""
    out, lse = attended(q, k, v)
    return out * torch.sigmoid(lse - sinks.view(1, -1, 1)).unsqueeze(-1).to(out.dtype)


def exact(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * D**-0.5).masked_fill(torch.ones(q.shape[2], k.shape[2]).triu(1).bool(), -torch.inf)
    joined = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    return joined.softmax(-1)[..., :-1] @ v


def exact_transposed(*inputs: Tensor) -> Tensor:
    return exact(*inputs).transpose(1, 2)


FORMS = {"transformers": (as_transformers_does, exact_transposed), "sigmoid": (by_sigmoid, exact)}
forms = pytest.mark.parametrize(("function", "like"), FORMS.values(), ids=FORMS)


def _inputs(*, dtype: torch.dtype = torch.float32, grad: bool = False, length: int = S) -> list[Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(B, n, length, D).to(dtype) for n in (H, HKV, HKV)]
    return [x.requires_grad_(grad) for x in (*made, torch.randn(H).to(dtype))]


def _check(function: Function, like: Function, inputs: list[Tensor], **options: Any) -> Compiled:
    return check(function, inputs, like=like, **{"lowerings": ["reference"], **options})


def _is_lowered(run: Compiled) -> bool:
    return not {flex.OPERATION, "logsumexp", "exp", "sigmoid"} & set(run.calls)


@pytest.mark.in_turns(2)
@forms
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_the_call_becomes_a_site_with_sinks(function: Function, like: Function, grad: bool) -> None:
    run = _check(function, like, _inputs(grad=grad))
    assert run.site.pattern == "flex attention"
    assert run.site.spec.mask.words == "causal (proved)"
    assert run.site.spec.k.shape == (B, HKV, S, D)
    assert run.site.spec.score.sinks is not None
    assert run.site.spec.score.sinks.requires_grad == grad
    assert run.site.decision.lowering == "reference"
    assert _is_lowered(run)


@forms
def test_half_precision_is_as_near_as_the_model(function: Function, like: Function) -> None:
    inputs = _inputs(dtype=torch.bfloat16)
    run = compiled(function, lowerings=["reference"])
    got, right = run(*inputs), like(*(x.double() for x in inputs))
    assert got.dtype == torch.bfloat16
    assert (got - right).abs().max() <= 2 * (function(*inputs) - right).abs().max()
    assert run.site.spec.score.sinks is not None
    assert _is_lowered(run)


def test_logits_that_are_wider_than_the_attention() -> None:
    """The output comes back to q's dtype."""
    inputs = [*_inputs(dtype=torch.bfloat16)[:3], torch.randn(H)]
    run = compiled(as_transformers_does, lowerings=["reference"])
    got, right = run(*inputs), exact_transposed(*(x.double() for x in inputs))
    assert got.dtype == torch.bfloat16
    assert (got - right).abs().max() <= 2 * (as_transformers_does(*inputs) - right).abs().max()
    assert _is_lowered(run)


@forms
def test_sizes_that_vary(function: Function, like: Function) -> None:
    run = compiled(function, lowerings=["reference"])
    for length in (S, 13):
        inputs = [mark(x, [length]) if x.dim() == 4 else x for x in _inputs(length=length)]
        torch.testing.assert_close(run(*inputs).double(), like(*(x.double() for x in inputs)), atol=3e-6, rtol=3e-5)
    assert run.site.spec.score.sinks is not None
    assert _is_lowered(run)


def test_what_verification_holds_against_the_model() -> None:
    _check(as_transformers_does, exact_transposed, _inputs(), verify=True)


def test_two_layers() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return as_transformers_does(as_transformers_does(q, k, v, sinks).transpose(1, 2), k, v, sinks)

    def like(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return exact_transposed(exact(q, k, v, sinks), k, v, sinks)

    run = _check(function, like, _inputs())
    assert run.report.num_sites == 2
    assert _is_lowered(run)


def test_a_row_without_a_key_is_nothing() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        out, lse = flex_attention(  # type: ignore[misc]
            q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i > 2, s, -torch.inf), enable_gqa=True, return_lse=True
        )
        return out * torch.sigmoid(lse - sinks.view(1, -1, 1)).unsqueeze(-1)  # type: ignore[operator]

    run = compiled(function, lowerings=["reference"])
    got = run(*_inputs())
    torch.testing.assert_close(got, function(*_inputs()), atol=3e-6, rtol=3e-5)
    assert not got[:, :, :3].any()
    assert run.site.spec.score.sinks is not None


# ---- what becomes of the call ---------------------------------------------------------------------------------------


@forms
def test_a_site_without_a_lowering_keeps_the_call(function: Function, like: Function) -> None:
    run = _check(function, like, _inputs(), lowerings=["sdpa_flash"])
    assert run.site.decision.lowering == "untouched"
    assert run.calls.count(flex.OPERATION) == 1
    assert not {"softmax", "matmul"} & set(run.calls)


@forms
def test_giving_back_leaves_the_graph_as_it_came(function: Function, like: Function) -> None:
    gm, _ = captured(function, *_inputs())
    before = [(node.op, str(node.target), str(node.args)) for node in gm.graph.nodes]
    found = flex.spell_flex(gm)
    assert len(found.spelled) == 1
    flex.give_back(gm, found.spelled)
    gm.graph.lint()
    assert [(node.op, str(node.target), str(node.args)) for node in gm.graph.nodes] == before


def test_transformers_own_function() -> None:
    """On a device that is no CPU: there it refuses sinks. That its lines are those above, this holds."""
    module = pytest.importorskip("transformers.integrations.flex_attention")

    def function(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Any:
        layer = torch.nn.Module()
        block_mask = create_block_mask(_causal, None, None, S, S, device="meta")
        return module.flex_attention_forward(layer, q, k, v, block_mask, scaling=0.25, s_aux=sinks)[0]

    gm, _ = captured(function, *(x.to("meta") for x in _inputs(dtype=torch.bfloat16)))
    (spelled,) = flex.spell_flex(gm).spelled
    assert spelled.own.meta["example_value"].shape == (B, H, S, D)
    mirrored = mirror.build(gm)
    (anchor,) = (node for node in mirrored.graph.nodes if node.target in softmaxes.CALLS)
    assert softmax_chain.match(mirrored, anchor).scores.sinks is not None
