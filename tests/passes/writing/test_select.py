"""The decision: from the spec, the target and the options alone, with every refusal kept."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import attn_compiler
from attn_compiler import lowerings
from attn_compiler.lowerings.base import Lowering
from attn_compiler.lowerings.choice import priorities
from attn_compiler.options.options import Options
from attn_compiler.passes.graph.faults import Log
from attn_compiler.passes.graph.site import Site
from attn_compiler.passes.graph.unit import FoundSites
from attn_compiler.passes.writing import select
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.reporting import wording
from attn_compiler.spec import dims, target as spec_target
from attn_compiler.spec.attention import AttentionSpec, StoredSpec, TensorSpec
from attn_compiler.spec.masks import Causal, Flag, MaskSpec
from attn_compiler.spec.scores import ScoreSpec, Softcap
from attn_compiler.spec.target import Target
from tests.passes.compiling import CPU_FLASH, compiled

TENSOR = TensorSpec(shape=(2, 4, 1200, 64), strides=(307200, 76800, 64, 1), dtype="bfloat16")
SPEC = AttentionSpec(
    q=TENSOR, k=TENSOR, v=TENSOR, mask=MaskSpec(), score=ScoreSpec(scale=0.125), device="cuda", out_dtype="bfloat16"
)
CPU = dataclasses.replace(SPEC, device="cpu")
CAPPED = dataclasses.replace(CPU, score=ScoreSpec(scale=0.125, changes=(Softcap(cap=50.0),)))


def test_only_what_would_be_chosen_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    too_old = Reason(code=Code.NOT_COMPILED, rule="its kernel compiles", observed="it does not")

    def cannot_build(self: Lowering, spec: AttentionSpec, target: Target) -> list[Reason]:
        built.append(self.name)
        return [too_old] if self.name == "sdpa_flash" else []

    monkeypatch.setattr(Lowering, "cannot_build", cannot_build)
    decision = select.decide(SPEC, Target.fake(disabled=frozenset({"cudnn"})), Options())
    assert (built, decision.lowering) == (["sdpa_flash", "sdpa_efficient"], "sdpa_efficient")
    assert [refusal.lowering for refusal in decision.refusals] == ["sdpa_cudnn", "sdpa_flash"]
    assert decision.refusals[1].reasons == (too_old,)
    assert [refusal.when_built for refusal in decision.refusals] == [False, True]


def test_the_first_that_does_not_refuse_is_taken_and_the_refusals_before_it_are_kept() -> None:
    target = Target.fake(disabled=frozenset({"cudnn"}))
    decision = select.decide(SPEC, target, Options())
    assert decision.lowering == "sdpa_flash"
    assert [refusal.lowering for refusal in decision.refusals] == ["sdpa_cudnn"]
    assert all(refusal.reasons for refusal in decision.refusals)


def test_the_same_question_has_the_same_answer() -> None:
    answers = {select.decide(SPEC, Target.fake(), Options()) for _ in range(3)}
    assert len(answers) == 1


def test_without_options_the_priorities_of_the_target_decide() -> None:
    for spec, target in ((SPEC, Target.fake()), (CPU, Target.fake(device="cpu"))):
        decision = select.decide(spec, target, Options())
        asked = [*(refusal.lowering for refusal in decision.refusals), decision.lowering]
        assert asked == list(priorities.order(spec, target)[: len(asked)])
        assert decision.lowering != "untouched"


def test_what_everybody_refuses_stays_untouched_with_the_reasons() -> None:
    decision = select.decide(CAPPED, Target.fake(device="cpu"), Options(lowerings=("sdpa_cpu_flash",)))
    assert decision.lowering == "untouched"
    (refusal,) = decision.refusals
    assert refusal.lowering == "sdpa_cpu_flash"
    assert "softcap" in str(refusal.reasons[0])


def test_one_lowering_alone() -> None:
    target = Target.fake(device="cpu")
    assert select.decide(CAPPED, target, Options(lowering="reference")).lowering == "reference"
    refused = select.decide(CAPPED, target, Options(lowering="sdpa_cpu_flash"))
    assert refused.lowering == "untouched"
    assert [refusal.lowering for refusal in refused.refusals] == ["sdpa_cpu_flash"]


def test_some_lowerings_in_an_order_of_ones_own() -> None:
    options = Options(lowerings=("sdpa_efficient", "sdpa_cudnn"))
    assert select.decide(SPEC, Target.fake(), options).lowering == "sdpa_efficient"


def test_reference_is_taken_only_when_asked_for() -> None:
    for target in (Target.fake(), Target.fake(device="cpu")):
        spec = dataclasses.replace(CAPPED, device=target.device)
        assert select.decide(spec, target, Options()).lowering != "reference"


def test_unknown_name_says_which_there_are() -> None:
    with pytest.raises(KeyError, match="sdpa_cpu_flash"):
        lowerings.by_name("sdpa_cpu_flush")


def test_options_reach_the_decision() -> None:
    run = compiled(lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q), lowering="untouched")
    run(torch.randn(2, 4, 6, 8))
    assert run.site.decision.lowering == "untouched"
    assert CPU_FLASH not in run.calls


#: lowerings that run without this package: their ops are ATen's own, or Inductor compiles their kernels
IN_EXPORTS = {"sdpa_cpu_flash", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "math", "absorbed", "untouched", "triton"}


@pytest.mark.parametrize("lowering", lowerings.LOWERINGS, ids=lambda lowering: lowering.name)
def test_an_exported_program_gets_no_kernel_that_is_launched_from_python(lowering: Lowering) -> None:
    """A new lowering is refused until it says that it runs without this package."""
    target = Target.fake(packaged=True)
    options = Options(lowering=lowering.name)
    first = [r.rule for refusal in select.decide(SPEC, target, options).refusals for r in refusal.reasons][:1]
    of_package = [reason.rule for reason in lowering.cannot_package()][:1]
    assert bool(of_package) == (lowering.name not in IN_EXPORTS)
    assert not of_package or first == of_package
    assert all(lowering.name in reason.observed for reason in lowering.cannot_package())


def test_what_is_chosen_for_an_exported_program_runs_without_this_package() -> None:
    orders = (Options(), Options(lowerings=("hopper", "cudnn", "sdpa_flash")))
    chosen = [select.decide(SPEC, Target.fake(packaged=True), options) for options in orders]
    assert {decision.lowering for decision in chosen} <= IN_EXPORTS - {"untouched"}
    assert [refusal.lowering for refusal in chosen[1].refusals] == ["hopper", "cudnn"]
    assert select.decide(SPEC, Target.fake(packaged=True), Options(lowering="triton")).lowering == "triton"


def _site(options: Options) -> Site:
    site = Site(match=types.SimpleNamespace(pattern="sdpa call"), module="attn")  # type: ignore[arg-type]
    size = dataclasses.replace(TENSOR, shape=(8, 16, 8192, 128))
    site.spec = dataclasses.replace(SPEC, q=size, k=size, v=size, mask=MaskSpec(kinds=(Causal(),), flag=Flag.CALLED))
    unit = types.SimpleNamespace(options=options, log=Log(strict=True))
    select.select_lowerings(unit, FoundSites(sites=(site,)), {SPEC.device: Target.fake()})  # type: ignore[arg-type]
    return site


def test_a_site_has_the_measurement_that_decided_and_what_a_call_may_take() -> None:
    site = _site(Options())
    assert site.decision is not None
    assert site.evidence is not None
    assert site.estimate is not None
    assert site.decision.lowering in site.evidence.order
    assert site.estimate.other == "sdpa_cudnn"
    select.leave_alone(site, Reason(code=Code.DTYPE, rule="r", observed="o"))
    assert (site.evidence, site.estimate) == (None, None)


def test_what_is_asked_for_by_name_has_no_measurement_that_decided() -> None:
    assert _site(Options(lowering="hopper")).evidence is None


_LOWEST = torch.finfo(torch.float32).min
#: what models register in `__init__`, and how they mask with it
_TRIANGLE = torch.ones(1, 1, 16, 16).tril()
BUFFERS: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "nanoGPT": (_TRIANGLE, lambda s, m: s.masked_fill(m[:, :, :12, :12] == 0, -math.inf)),
    "minGPT": (_TRIANGLE[0, 0], lambda s, m: s.masked_fill(m[:12, :12] == 0, -math.inf)),
    "GPT-2": (_TRIANGLE.bool(), lambda s, m: torch.where(m[:, :, :12, :12], s, torch.full([], _LOWEST))),
    "GPT-Neo": (_TRIANGLE.bool(), lambda s, m: torch.where(m[:, :, 4:, :12][:, :, :12], s, torch.tensor(_LOWEST))),
    "of bytes": (_TRIANGLE.to(torch.uint8), lambda s, m: s.masked_fill(m[:, :, :12, :12] == 0, -math.inf)),
    "of the upper triangle": (_TRIANGLE.bool().logical_not(), lambda s, m: s.masked_fill(m[:, :, :12, :12], -1e9)),
    "added": ((1 - _TRIANGLE) * _LOWEST, lambda s, m: s + m[:, :, :12, :12]),
    "added by its numbers": (_TRIANGLE, lambda s, m: s + (1 - m[:, :, :12, :12]) * _LOWEST),
    "GPT-1": (_TRIANGLE, lambda s, m: s * m[:, :, :12, :12] + -1e9 * (1 - m[:, :, :12, :12])),
    "none": (_TRIANGLE, lambda s, m: s),
    "cut at run time": (_TRIANGLE.bool(), lambda s, m: s.masked_fill(~m[..., : s.shape[-2], : s.shape[-1]], -math.inf)),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_a_site_that_no_kernel_is_asked_for_says_why(name: str) -> None:
    """In training on a CPU."""
    buffer, mask = BUFFERS[name]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bias", buffer)

        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return torch.softmax(mask(q @ q.mT, self.bias), -1) @ q

    torch._dynamo.reset()
    attn_compiler.reset()
    model, q = Model(), torch.randn(2, 2, 12, 8, requires_grad=True)
    run = torch.compile(model, backend="attn_compiler", options={"inner": "eager", "strict": True})
    torch.testing.assert_close(run(q), model(q))
    (report,) = attn_compiler.reports()
    told = [reason for site in report.sites for refusal in site.decision.refusals for reason in refusal.reasons]
    told += [miss.reason for miss in report.misses]
    assert told
    for site in report.sites:
        assert site.decision.lowering == "untouched"
        assert [reason.code for reason in told] == [Code.OWN_IS_FASTEST]
        assert "CPU flash" in told[0].observed
        assert "AC408" in str(report)
        asked = site.spec.mask
        assert asked.dense is None or asked.read or wording.unproved(asked) is not None


def test_what_is_left_alone_without_a_measurement_says_so() -> None:
    decision = select.decide(SPEC, Target.fake(sm=200), Options())
    assert decision.lowering == "untouched"
    assert all(refusal.reasons for refusal in decision.refusals)
    assert decision.refusals


def test_what_was_asked_for_by_name_needs_no_reason() -> None:
    assert select.decide(SPEC, Target.fake(), Options(lowering="untouched")).refusals == ()


# Zeros behind each head's numbers, where no kernel takes the head dims.
def _masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :])


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT * 0.2).softmax(-1) @ v


def _by_triton(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    attn_compiler.reset()
    torch.compiler.reset()
    options = {"inner": "aot_eager", "lowering": "triton", "strict": True}
    return torch.compile(function, backend="attn_compiler", options=options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="in Triton's interpreter")
@pytest.mark.parametrize("function", [_masked, _causal, _written_out])
@pytest.mark.parametrize(("dim", "dim_v", "copied"), [(20, 20, "qkv"), (12, 24, "qk"), (16, 20, "v")])
def test_zeros_change_no_result_and_no_gradient(
    function: Callable[..., torch.Tensor], dim: int, dim_v: int, copied: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second length is a symbol."""
    monkeypatch.setattr(spec_target, "TRITON_INTERPRETED", True)
    monkeypatch.setattr(spec_target, "_triton_version", lambda: "3.7.0")
    compiled_once = _by_triton(function)
    for length in (33, 47):
        sizes = ((length, dim), (length, dim), (length, dim_v))
        given = [torch.randn(2, 3, *size, dtype=torch.float16).requires_grad_() for size in sizes]
        keep = torch.arange(length).expand(2, -1) < torch.tensor([[length], [20]])
        found, exact = compiled_once(*given, keep), function(*(x.double() for x in given), keep)
        grad = torch.randn_like(found)
        gradients = torch.autograd.grad(found, given, grad), torch.autograd.grad(exact, given, grad.double())
        for one, other in zip((found, *gradients[0]), (exact, *gradients[1]), strict=True):
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-2, atol=4e-3)
        report = attn_compiler.reports()[-1]
        (record,) = report.sites
        assert report.not_kept is None
        assert "".join(copy.operand for copy in record.copies if "zeros" in copy.why) == copied
        assert (record.spec.head_dim_qk, record.spec.head_dim_v) == (-(-dim // 8) * 8, -(-dim_v // 8) * 8)


_ODD = dataclasses.replace(TENSOR, shape=(2, 4, 1200, 52), strides=(249600, 62400, 52, 1))
_CAPPED = ScoreSpec(scale=0.125, changes=(Softcap(cap=50.0),))


@pytest.mark.parametrize("sm", [80, 90, 100])
@pytest.mark.parametrize(
    ("changes", "is_widened"),
    [
        ({"score": _CAPPED}, True),
        ({"decomposed": True}, True),
        # PyTorch's FlashAttention adds the zeros by itself.
        ({}, False),
        # A step would copy its cache.
        ({"score": _CAPPED, "q": dataclasses.replace(_ODD, shape=(2, 4, 16, 52))}, False),
        ({"score": _CAPPED, "stored": StoredSpec(k=_ODD, v=_ODD)}, False),
    ],
)
def test_zeros_are_added_where_no_kernel_takes_the_head_dim(sm: int, changes: dict[str, Any], is_widened: bool) -> None:
    spec = dataclasses.replace(SPEC, **{"q": _ODD, "k": _ODD, "v": _ODD, **changes})
    decision = select.decide(spec, Target.fake(sm=sm), Options())
    wide = spec.with_zeros(decision.zeros)
    assert (decision.lowering != "untouched", wide.q.shape[-1], wide.v.strides) == (
        (True, 56, (268800, 67200, 56, 1)) if is_widened else (False, 52, _ODD.strides)
    )


def test_strides_with_zeros_are_products_of_symbols() -> None:
    wide = dataclasses.replace(_ODD, shape=("s0", 4, "s1 + 1", 52)).with_zeros(8)
    assert wide.strides == ("(4)*((s1 + 1)*(56))", "(s1 + 1)*(56)", 56, 1)
    assert all(dims.is_multiple(stride, 8) for stride in wide.strides[:3])
    assert dataclasses.replace(_ODD, shape=(2, 4, 8, "s0")).with_zeros(8).shape[-1] == "s0"
