"""What flash_attn is given, what it compiles and when (with a stand-in), and, on a GPU, its numbers."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.fa4 import launch, replay
from attn_compiler.lowerings.fa4.lowering import FlashAttention4
from attn_compiler.lowerings.fa4.plan import Fa4Call
from attn_compiler.lowerings.plain import reference
from attn_compiler.lowerings.shared.launching.on_device import KnownCalls
from attn_compiler.passes.writing import layout
from attn_compiler.spec.target import Target
from tests import numerics
from tests.cases import Inputs
from tests.lowerings.fa4.cases import FORWARDS, PROBLEMS, Built, Problem, inputs
from tests.lowerings.fa4.stand_in import StandIn, flash, forget  # noqa: F401 - a fixture

BY_NAME = {problem.name: problem for problem in PROBLEMS}


def attention(built: Built, text: str | None = None) -> numerics.Attention:
    """Of the leaf op, with the copies that the layout pass would plan."""
    copied = {copy.operand for copy in layout.needed(built.spec, FlashAttention4().demand(built.spec))}

    def run(given: Inputs) -> Tensor:
        q, k, v = (
            x.contiguous() if name in copied else x for name, x in zip("qkv", (given.q, given.k, given.v), strict=True)
        )
        operands = [] if given.sinks is None else [given.sinks]
        out: Tensor = torch.ops.attn_compiler.fa4.default(q, k, v, operands, text or built.text())[0]
        return out

    return run


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_arguments_mean_what_the_spec_says(problem: Problem, flash: StandIn) -> None:  # noqa: F811
    """The first call, and one that is replayed, of other numbers."""
    for seed in (0, 1):
        built = inputs(problem, device="cpu", seed=seed)
        numerics.assert_within_rule(numerics.with_gradients(attention(built), built), built)
    assert len(flash.forwards) == len(flash.backwards) == 1


@pytest.mark.parametrize("problem", FORWARDS, ids=lambda problem: problem.name)
def test_arguments_mean_what_the_spec_says_without_gradients(problem: Problem, flash: StandIn) -> None:  # noqa: F811
    for seed in (0, 1):
        built = inputs(problem, device="cpu", needs_grad=False, seed=seed)
        numerics.assert_within_rule([attention(built)(built)], built)
    assert len(flash.forwards) == 1


def test_what_it_returns(flash: StandIn) -> None:  # noqa: F811
    built = inputs(BY_NAME["causal_bottom_right_empty_rows_bfloat16"], device="cpu", needs_grad=False)
    for _ in range(2):
        out, lse = torch.ops.attn_compiler.fa4.default(built.q, built.k, built.v, [], built.text())
        assert out.transpose(1, 2).is_contiguous()
        assert (lse.dtype, lse.shape) == (torch.float32, built.q.shape[:3])
        empty = built.q.shape[2] - built.k.shape[2]
        assert (out[:, :, :empty] == 0).all()
        assert (lse[:, :, :empty] == -torch.inf).all()
        assert lse[:, :, empty:].isfinite().all()


def test_a_gradient_of_the_lse_arrives(flash: StandIn) -> None:  # noqa: F811
    built = inputs(BY_NAME["causal_bfloat16"], device="cpu")
    _, lse = torch.ops.attn_compiler.fa4.default(built.q, built.k, built.v, [], built.text())
    (found,) = torch.autograd.grad(lse.sum(), [built.q])
    scores = built.q.float() @ built.k.float().mT * built.spec.score.scale
    causal = torch.ones_like(scores, dtype=torch.bool).tril()
    expected = torch.autograd.grad(scores.masked_fill(~causal, -torch.inf).logsumexp(-1).sum(), [built.q])
    assert torch.allclose(found, expected[0], atol=2e-2)


# ---- what is replayed, and when kernels are compiled ----------------------------------------------------------------


def test_calls_of_the_same_shapes_are_launched_without_the_functions(flash: StandIn) -> None:  # noqa: F811
    grouped = inputs(BY_NAME["gqa_bfloat16"], device="cpu")
    for count in (1, 2, 3):
        attention(grouped)(grouped).sum().backward()
        assert (len(flash.forwards), len(flash.backwards)) == (1, 1)
        # The first call's are tried once more, before they are replayed.
        assert len(flash.launches) == 6 * (count + 1)
    assert flash.launches[-6:] == [
        *("_flash_attn_fwd", "_bwd_preprocess", "_flash_attn_bwd"),
        *["_bwd_postprocess_convert"] * 3,
    ]


def test_what_gives_something_else_when_it_is_launched_again_is_not_replayed(
    flash: StandIn,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay, "gives", lambda *_: False)
    built = inputs(BY_NAME["causal_bfloat16"], device="cpu")
    for count in (1, 2, 3):
        attention(built)(built).sum().backward()
        assert (len(flash.forwards), len(flash.backwards)) == (count, count)


def test_other_shapes_go_through_the_functions_once(flash: StandIn) -> None:  # noqa: F811
    text = inputs(BY_NAME["causal_bfloat16"], device="cpu").text()
    for length in (16, 24, 16, 24):
        q, k, v = torch.randn(3, 1, 4, length, 64, dtype=torch.bfloat16).unbind()
        torch.ops.attn_compiler.fa4.default(q, k, v, [], text)
    assert [call["out"].shape[1] for call in flash.forwards] == [16, 24]
    assert len(flash.kernels) == 1


def test_what_is_replayed_does_not_grow_without_a_bound(
    flash: StandIn,  # noqa: F811
    known_calls: KnownCalls[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(KnownCalls, "_MOST", 2)
    text = inputs(BY_NAME["causal_bfloat16"], device="cpu").text()
    for length in (16, 24, 32, 32, 16):
        q, k, v = torch.randn(3, 1, 4, length, 64, dtype=torch.bfloat16).unbind()
        torch.ops.attn_compiler.fa4.default(q, k, v, [], text)
    assert len(known_calls) == 2
    assert [call["out"].shape[1] for call in flash.forwards] == [16, 24, 32, 16]


def test_what_kernels_can_not_read_as_it_is_goes_through_the_function(flash: StandIn) -> None:  # noqa: F811
    built = inputs(BY_NAME["causal_bfloat16"], device="cpu", needs_grad=False)
    attention(built)(built)
    off = torch.empty(built.q.numel() + 1, dtype=built.q.dtype)[1:].view(built.q.shape).copy_(built.q)
    repeated = built.k[:, :1].expand(built.k.shape)
    transposed = built.v.mT.contiguous().mT
    assert off.data_ptr() % 16 == 2
    for q, k, v in ((off, built.k, built.v), (built.q, repeated, built.v), (built.q, built.k, transposed)):
        for _ in range(2):
            flash.forwards.clear()
            out = torch.ops.attn_compiler.fa4.default(q, k, v, [], built.text())[0]
            assert len(flash.forwards) == 1
            assert torch.equal(out, torch.ops.attn_compiler.fa4.default(q, k, v, [], built.text(sm=100))[0])


def test_a_gradient_without_strides_is_written_out(flash: StandIn) -> None:  # noqa: F811
    built = inputs(BY_NAME["causal_bfloat16"], device="cpu")
    attention(built)(built).sum().backward()
    assert 0 not in flash.backwards[0]["dout"].stride()


def test_an_axis_of_one_element_may_have_a_stride_of_zero(flash: StandIn) -> None:  # noqa: F811
    built = inputs(BY_NAME["causal_bfloat16"], device="cpu")
    q, k, v = (x.detach()[:1] for x in (built.q, built.k, built.v))
    out, lse = launch.forward(q, k, v, [], built.text())
    grad_out = torch.randn_like(out).contiguous()
    grad_out = grad_out.as_strided(grad_out.shape, (0, *grad_out.stride()[1:]))
    launch.gradients(grad_out, torch.zeros_like(lse), q, k, v, [], out, lse, built.text())
    assert 0 not in flash.backwards[0]["dout"].stride()


def test_one_tensor_in_two_roles_is_never_replayed(flash: StandIn) -> None:  # noqa: F811
    """What was recorded could not tell which of the two an argument was."""
    built = inputs(BY_NAME["plain_bfloat16"], device="cpu", needs_grad=False)
    for k in (built.q, built.k, built.k):
        found = torch.ops.attn_compiler.fa4.default(built.q, k, built.v, [], built.text())[0]
        expected = numerics.attention(dataclasses.replace(numerics.cast(built, torch.float32), k=k.float()))
        assert torch.allclose(found.float(), expected, atol=2e-2)
    assert len(flash.forwards) == 3


def test_flash_attn_keeps_its_own_caches_of_kernels(flash: StandIn) -> None:  # noqa: F811
    kept = [function.compile_cache for function in launch._launching()]
    for name in ("causal_bfloat16", "causal_long_bfloat16"):
        built = inputs(BY_NAME[name], device="cpu")
        attention(built)(built).sum().backward()
    assert [function.compile_cache for function in launch._launching()] == kept
    assert sum(len(cache.cache) for cache in kept) == len(flash.kernels) == 4


def call_of(built: Built) -> Fa4Call:
    return Fa4Call.from_text(built.text())


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The made-up machine is this one."""
    monkeypatch.setattr(Target, "current", lambda device: Target.fake(flash_attn_4="4.0.0b36"))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_decision_compiles_and_the_first_call_does_not(needs_grad: bool, here: None, flash: StandIn) -> None:  # noqa: F811
    built = inputs(BY_NAME["window_gqa_sinks"], device="cpu", needs_grad=needs_grad)
    assert launch.why_not_compiled(call_of(built)) == []
    compiled = list(flash.kernels)
    assert (len(compiled), len(flash.launches), len(flash.backwards)) == (5 if needs_grad else 1, 0, int(needs_grad))
    out = attention(built)(built)
    if needs_grad:
        out.sum().backward()
    assert flash.kernels == compiled
    assert len(flash.launches) == (12 if needs_grad else 2)


def test_unknown_sizes_are_compiled_for_as_well(here: None, flash: StandIn) -> None:  # noqa: F811
    built = inputs(BY_NAME["causal_bfloat16"], device="cpu")
    spec = built.spec_on_gpu
    tensors = {
        name: dataclasses.replace(getattr(spec, name), shape=("s0", *getattr(spec, name).shape[1:2], "s1", 64))
        for name in "qkv"
    }
    call = dataclasses.replace(call_of(built), spec=dataclasses.replace(spec, **tensors))
    assert launch.why_not_compiled(call) == []
    assert flash.forwards[0]["out"].shape == (2, 1024, 4, 64)


@pytest.mark.parametrize("side", ["fails", "fails_backward"])
def test_what_does_not_compile_is_refused_with_its_own_words(side: str, here: None, flash: StandIn) -> None:  # noqa: F811
    setattr(flash, side, AssertionError("smem_capacity\nmore"))
    built = inputs(BY_NAME["causal_bfloat16"], device="cpu")
    assert FlashAttention4().why_not(built.spec_on_gpu, Target.current("cuda")) == []
    (reason,) = FlashAttention4().cannot_build(built.spec_on_gpu, Target.current("cuda"))
    assert reason.observed == "AssertionError: smem_capacity"


def test_another_machine_s_kernels_are_not_compiled(flash: StandIn) -> None:  # noqa: F811
    assert launch.why_not_compiled(call_of(inputs(BY_NAME["causal_bfloat16"], device="cpu"))) == []
    assert not flash.kernels


def test_deterministic_gradients_are_asked_for(flash: StandIn) -> None:  # noqa: F811
    built = inputs(BY_NAME["causal_bfloat16"], device="cpu")
    for deterministic in (False, True):
        attention(built, built.text(deterministic=deterministic))(built).sum().backward()
        assert flash.backwards[-1]["deterministic"] is deterministic


def test_sinks_that_are_not_learned_get_no_gradient(flash: StandIn) -> None:  # noqa: F811
    built = inputs(BY_NAME["sinks_full"], device="cpu")
    assert built.sinks is not None
    sinks = dataclasses.replace(built.spec.score.sinks, requires_grad=False)  # type: ignore[type-var]
    score = dataclasses.replace(built.spec.score, changes=(sinks,))
    frozen = dataclasses.replace(built, sinks=built.sinks.detach(), spec=dataclasses.replace(built.spec, score=score))
    found = torch.autograd.grad(attention(frozen)(frozen).square().sum(), [frozen.q])
    assert flash.backwards[-1]["learnable_sink"] is None
    learned = torch.autograd.grad(attention(built)(built).square().sum(), [built.q, built.sinks])
    assert torch.equal(found[0], learned[0])


# ---- with flash_attn ----------------------------------------------------------------------------------------------


needs_flash_attn = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn-4: pip install 'flash-attn-4==4.0.0b36'"
)


@needs_flash_attn
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize("name", ["window_gqa_sinks", "softcap_wide", "wide_192_128", "head_dims_differ_bfloat16"])
def test_kernels_of_hopper_compile_without_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash_attn reads these when it first needs them."""
    for variable, value in (
        ("FLASH_ATTENTION_ARCH", "sm_90"),
        ("CUTE_DSL_ARCH", "sm_90a"),
        ("FLASH_ATTENTION_NUM_SMS", "132"),
    ):
        monkeypatch.setenv(variable, value)
    forget()
    found = launch._compiled(call_of(inputs(BY_NAME[name], device="cpu")), torch.bfloat16)
    forget()
    assert found is None


@pytest.mark.gpu
@needs_flash_attn
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_numbers_on_a_gpu(problem: Problem, known_calls: KnownCalls[Any]) -> None:
    """The first call, and one that is replayed, of other numbers."""
    text = text_here(inputs(problem, device="cuda"))
    for seed in (0, 1):
        built = inputs(problem, device="cuda", seed=seed)
        numerics.assert_within_rule(numerics.with_gradients(attention(built, text), built), built)
    replays = [same.replay for same in known_calls.values()]
    assert len(replays) == 2
    assert None not in replays, "what the functions did was not replayed"


@pytest.mark.gpu
@needs_flash_attn
@pytest.mark.parametrize("problem", FORWARDS, ids=lambda problem: problem.name)
def test_numbers_without_gradients_on_a_gpu(problem: Problem) -> None:
    for seed in (0, 1):
        built = inputs(problem, device="cuda", needs_grad=False, seed=seed)
        numerics.assert_within_rule([attention(built, text_here(built))(built)], built)


@pytest.mark.gpu
@needs_flash_attn
def test_padded_head_dims_still_have_a_wrong_gradient() -> None:
    """known_bad.FLASH_ATTN_4: fails once they are right."""
    problem = next(problem for problem in FORWARDS if problem.case.head_dim == 72)
    built = inputs(problem, device="cuda")
    with pytest.raises(AssertionError, match="dq: off by"):
        numerics.assert_within_rule(numerics.with_gradients(attention(built, text_here(built)), built), built)


def text_here(built: Built, *, deterministic: bool = False) -> str:
    """The leaf op's, for this machine."""
    target = Target.current("cuda")
    return built.text(sm=target.sm, version=target.flash_attn_4, deterministic=deterministic)


@pytest.mark.gpu
@needs_flash_attn
def test_the_lse_and_its_gradient_on_a_gpu() -> None:
    for name in ("causal_bottom_right_empty_rows_bfloat16", "long_128"):
        built = inputs(BY_NAME[name], device="cuda")
        given = (built.q, built.k, built.v)
        out, lse = torch.ops.attn_compiler.fa4.default(*given, [], text_here(built))
        plain = tuple(x.detach() for x in given)
        _, right = reference.forward(*plain, [], built.spec)
        assert torch.equal(lse.isinf(), right.isinf())
        assert torch.allclose(lse, right, atol=1e-3)
        grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
        found = torch.autograd.grad((out, lse), given, (grad_out, grad_lse))
        expected = reference.backward(grad_out, grad_lse, *plain, [], built.spec)
        for mine, other in zip(found, expected[:3], strict=True):
            assert float((mine - other).abs().max() / other.abs().max()) < 0.02


@pytest.mark.gpu
@needs_flash_attn
def test_deterministic_gradients_are_the_same_bits() -> None:
    built = inputs(BY_NAME["long_128"], device="cuda")
    text = text_here(built, deterministic=True)
    first, *others = (numerics.with_gradients(attention(built, text), built) for _ in range(5))
    assert all(torch.equal(mine, right) for other in others for mine, right in zip(other, first, strict=True))


@pytest.mark.gpu
@needs_flash_attn
def test_a_cuda_graph_replays_it() -> None:
    built = inputs(BY_NAME["long_64"], device="cuda", needs_grad=False)
    run = attention(built, text_here(built))
    run(built)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(built)
    built.q.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, run(built))
