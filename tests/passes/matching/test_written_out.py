"""Attention whose softmax is written out is a site, or told as a miss, once; what only looks like it is not told at all."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn_compiler.reasons.codes import Code
from tests.passes.compiling import Compiled, compiled

B, H, S, D = 2, 3, 8, 4
Function = Callable[..., Tensor]


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * D**-0.5


def causal(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), float("-inf"))


# ---- exp, and a division by its sum -----------------------------------------------------------------------------------


def divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores_of(q, k).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


def less_the_largest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = causal(scores_of(q, k))
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return torch.div(e, torch.sum(e, dim=-1, keepdim=True)) @ v


def less_the_largest_in_float(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores_of(q, k).float()
    e = (s - s.max(-1, keepdim=True).values).exp()
    return (e / e.sum(-1, keepdim=True)).to(q.dtype) @ v


def masked_after_exp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores_of(q, k).exp() * torch.ones(S, S).tril()
    return torch.einsum("bhqk,bhkd->bhqd", e / e.sum(-1, keepdim=True).clamp(min=1e-9), v)


def by_a_reciprocal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores_of(q, k).exp()
    return (e * e.sum(-1, keepdim=True).reciprocal()) @ v


def normalized(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.normalize(scores_of(q, k).exp(), p=1.0, dim=-1) @ v


def with_a_one_more(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores_of(q, k).exp()
    return (e / (1 + e.sum(-1, keepdim=True))) @ v


def of_keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = (k @ q.mT).exp()
    return (e / e.sum(-2, keepdim=True)).mT @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.einsum("bhqd,bhkd->bhqk", q, k).exp()
    return torch.einsum("bhqk,bhkd->bhqd", e, v) / torch.einsum("bhqk->bhq", e)[..., None]


def in_three_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    e = torch.bmm(q, k.transpose(1, 2)).exp()
    return torch.bmm(e * e.sum(dim=2, keepdim=True).pow(-1), v).unflatten(0, (B, H))


def in_base_two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.exp2(scores_of(q, k) * 1.4427)
    return (e / e.sum(-1, True)) @ v


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores_of(q, k).exp_()
    return e.div_(e.sum(-1, keepdim=True)) @ v


def with_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores_of(q, k).exp()
    return F.dropout(e / e.sum(-1, keepdim=True), 0.0) @ v


def in_blocks_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores_of(q, k)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    total, out = e.sum(-1, keepdim=True), e @ v
    return out / total


def with_a_column_of_sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.cat([causal(scores_of(q, k)), torch.full((B, H, S, 1), 0.7)], -1).exp()
    return (e / e.sum(-1, keepdim=True))[..., :-1] @ v


# ---- by its logarithm -------------------------------------------------------------------------------------------------


def log_softmax_exp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.log_softmax(scores_of(q, k), -1).exp() @ v


def log_softmax_exp_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.exp(torch.log_softmax(causal(scores_of(q, k)), dim=-1)) @ v


def log_softmax_in_float(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores_of(q, k).log_softmax(-1, dtype=torch.float32).exp().to(q.dtype) @ v


def log_softmax_over_keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (k @ q.mT).log_softmax(-2).exp().transpose(-1, -2) @ v


def less_logsumexp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores_of(q, k)
    return torch.exp(s - torch.logsumexp(s, -1, keepdim=True)) @ v


def less_logsumexp_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = causal(scores_of(q, k))
    return (s - s.logsumexp(-1)[..., None]).exp() @ v


def less_logsumexp_written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores_of(q, k)
    largest = s.amax(-1, keepdim=True)
    lse = largest + (s - largest).exp().sum(-1, keepdim=True).log()
    return (s - lse).exp() @ v


#: what a pattern knows
FOUND: tuple[Function, ...] = (
    divided,
    less_the_largest,
    less_the_largest_in_float,
    by_a_reciprocal,
    of_keys_first,
    in_three_axes,
    with_dropout,
    log_softmax_exp,
    log_softmax_exp_masked,
    log_softmax_in_float,
    log_softmax_over_keys_first,
    less_logsumexp,
    less_logsumexp_masked,
    with_a_one_more,
    in_blocks_of_keys,
    with_a_column_of_sinks,
)

#: what none knows
WRITTEN: tuple[Function, ...] = (
    masked_after_exp,
    normalized,
    by_einsum,
    in_base_two,
    in_place,
    less_logsumexp_written_out,
)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, S, D, generator=generator) for _ in range(3))
    return q, k, v


def run_on(function: Any, *given: Tensor, **options: Any) -> Compiled:
    run = compiled(function, **options)
    torch.testing.assert_close(run(*given), function(*given))
    return run


def both(function: Any) -> list[Tensor]:
    """Output and gradients."""
    given = [x.requires_grad_() for x in inputs()]
    out = function(*given)
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), given)]


@pytest.mark.parametrize("function", FOUND, ids=lambda f: f.__name__)
def test_a_softmax_that_is_written_out_is_a_site_if_a_pattern_knows_it(function: Function) -> None:
    run = compiled(function, lowerings=("sdpa_cpu_flash", "reference"))
    for found, wanted in zip(both(run), both(function), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    (site,) = run.report.sites
    assert site.decision.lowering in ("sdpa_cpu_flash", "reference")
    assert run.report.num_misses == 0
    assert site.spec.mask.words.startswith("causal (proved)") == ("causal" in inspect.getsource(function))


@pytest.mark.parametrize("function", WRITTEN, ids=lambda f: f.__name__)
def test_a_softmax_that_is_written_out_is_one_miss(function: Function) -> None:
    report = run_on(function, *inputs()).report
    (miss,) = report.misses
    assert report.num_sites == 0
    assert (report.num_misses, miss.reason.code) == (1, Code.WRITTEN_BY_HAND)
    assert "torch.softmax" in miss.reason.advice
    assert str(miss.source).startswith("test_written_out.py:")


def test_it_is_told_beside_other_attention_and_in_training() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(masked_after_exp(q, k, v), k, v)

    report = run_on(model, *(x.requires_grad_() for x in inputs())).report
    assert (report.num_sites, report.num_misses) == (1, 1)


def test_lengths_may_be_symbolic() -> None:
    report = run_on(masked_after_exp, *inputs(), dynamic=True).report
    assert [miss.reason.code for miss in report.misses] == [Code.WRITTEN_BY_HAND]


def test_a_checkpoint_s_body_is_looked_into() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = checkpoint(masked_after_exp, q, k, v, use_reentrant=False)
        return out

    report = run_on(model, *(x.requires_grad_() for x in inputs())).report
    assert [miss.reason.code for miss in report.misses] == [Code.WRITTEN_BY_HAND]


def test_layers_are_one_row() -> None:
    class Layer(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return masked_after_exp(q, k, v)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for layer in self.layers:
                q = layer(q, k, v)
            return q

    (miss,) = run_on(Model(), *inputs()).report.misses
    assert miss.modules == ("layers.0", "layers.1")


@pytest.mark.parametrize("module", [nn.Softmin(-1), lambda s: F.softmin(s, -1), lambda s: F.softmin(s.float(), dim=-1)])
def test_softmin_is_the_softmax_of_the_negative_and_no_miss(module: Any) -> None:
    report = run_on(lambda q, k, v: module(-scores_of(q, k)) @ v, *inputs()).report
    assert (report.num_sites, report.num_misses) == (1, 0)


def test_softmin_that_is_not_understood_is_a_miss() -> None:
    report = run_on(lambda q, k, v: F.softmin(torch.cdist(q, k), -1) @ v, *inputs()).report
    assert (report.num_sites, report.num_misses) == (0, 1)


# ---- what is no attention ---------------------------------------------------------------------------------------------


class Weighing(nn.Module):
    """What is made of a linear layer's numbers, or of parameters."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.gate, self.function = nn.Linear(D, 5), function
        self.experts, self.codes = nn.Parameter(torch.randn(5, D, D)), nn.Parameter(torch.randn(5, D))
        self.query = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def softmax_by_hand(logits: Tensor, dim: int = -1) -> Tensor:
    e = (logits - logits.amax(dim, keepdim=True)).exp()
    return e / e.sum(dim, keepdim=True)


def mixture_of_experts(m: Any, x: Tensor) -> Tensor:
    return torch.einsum("bhse,bhsed->bhsd", softmax_by_hand(m.gate(x)), torch.einsum("bhsd,edf->bhsef", x, m.experts))


def router_of_a_parameter(m: Any, x: Tensor) -> Tensor:
    return torch.einsum(
        "bhse,bhsed->bhsd", softmax_by_hand(x @ m.codes.t()), torch.einsum("bhsd,edf->bhsef", x, m.experts)
    )


def router_by_cosines(m: Any, x: Tensor) -> Tensor:
    weights = softmax_by_hand(F.normalize(x, dim=-1) @ F.normalize(m.codes, dim=-1).t() * 2.0)
    return torch.einsum("bhse,bhsed->bhsd", weights, torch.einsum("bhsd,edf->bhsef", x, m.experts))


def pooling_by_a_learned_query(m: Any, x: Tensor) -> Tensor:
    return (softmax_by_hand(x @ m.query)[..., None] * x).sum(-2)


def soft_codebook(m: Any, x: Tensor) -> Tensor:
    return softmax_by_hand(x @ m.codes.t()) @ m.codes


def sampling(m: Any, x: Tensor) -> Tensor:
    return softmax_by_hand(m.gate(x[:, 0, -1]) / 0.7).cumsum(-1)


def entropy(m: Any, x: Tensor) -> Tensor:
    logs = F.log_softmax(m.gate(x), -1)
    return -(logs.exp() * logs).sum(-1)


def contrastive_loss(m: Any, x: Tensor) -> Tensor:
    similar = F.normalize(x.flatten(0, 2), dim=-1) @ F.normalize(m.gate(x).flatten(0, 2)[:, :D], dim=-1).t()
    e = similar.exp()
    return -(similar.diagonal() - e.sum(-1).log()).mean()


def distillation(m: Any, x: Tensor) -> Tensor:
    one, two = F.log_softmax(x @ x.mT, -1), F.log_softmax((x + 1) @ x.mT, -1)
    return (one.exp() * (one - two)).sum(-1).mean()


def kernel_of_distances(m: Any, x: Tensor) -> Tensor:
    e = (-torch.cdist(x, x)).exp()
    return (e / e.sum(-1, keepdim=True)) @ x


def sinkhorn(m: Any, x: Tensor) -> Tensor:
    kernel = (x @ x.mT).exp()
    u = torch.ones_like(x[..., :1])
    for _ in range(3):
        u = 1 / (kernel @ (1 / (kernel.mT @ u)))
    return u


def not_normalised(m: Any, x: Tensor) -> Tensor:
    s = x @ x.mT
    return (s - s.amax(-1, keepdim=True)).exp() @ x


def sigmoid_attention(m: Any, x: Tensor) -> Tensor:
    return torch.sigmoid(x @ x.mT) @ x


def sums_of_exps_of_q_and_of_k(m: Any, x: Tensor) -> Tensor:
    q, k = x.exp(), (x + 1).exp()
    return (q / q.sum(-1, keepdim=True)) @ ((k / k.sum(-2, keepdim=True)).mT @ x)


def sum_over_another_axis(m: Any, x: Tensor) -> Tensor:
    e = (x @ x.mT).exp()
    return (e / e.sum(-2, keepdim=True)) @ x


def weights_alone(m: Any, x: Tensor) -> Tensor:
    return softmax_by_hand(x @ x.mT)


NONE = (
    mixture_of_experts,
    router_of_a_parameter,
    router_by_cosines,
    pooling_by_a_learned_query,
    soft_codebook,
    sampling,
    entropy,
    contrastive_loss,
    distillation,
    kernel_of_distances,
    sinkhorn,
    not_normalised,
    sigmoid_attention,
    sums_of_exps_of_q_and_of_k,
    sum_over_another_axis,
    weights_alone,
)


@pytest.mark.parametrize("function", NONE, ids=lambda f: f.__name__)
def test_what_is_no_attention_is_no_miss(function: Callable[[Any, Tensor], Any]) -> None:
    torch.manual_seed(0)
    report = run_on(Weighing(function).eval(), torch.randn(B, H, S, D)).report
    assert (report.num_sites, report.num_misses) == (0, 0)


@pytest.mark.parametrize("inside", [False, True])
def test_a_router_is_no_miss_in_a_checkpoint_either(inside: bool) -> None:
    torch.manual_seed(0)
    model = Weighing(router_of_a_parameter)

    def run(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(model, x, use_reentrant=False) if inside else model(x)
        return out

    assert run_on(run, torch.randn(B, H, S, D, requires_grad=True)).report.num_misses == 0
