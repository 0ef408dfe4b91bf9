"""Backwards of our kernels: what they are told, allocate, hand on and copy; cuDNN's for other forwards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_compiler import Fp8Recipe
from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.shared.calls import cudnn_backward, cudnn_called, gradient_launch
from attn_compiler.lowerings.shared.calls.arguments import STATS_BLOCK, prepare
from attn_compiler.lowerings.shared.calls.backward import Backward
from attn_compiler.lowerings.shared.calls.backward_call import BackwardByKernels
from attn_compiler.lowerings.shared.launching import replaying
from attn_compiler.lowerings.shared.launching.launch import Arguments
from attn_compiler.lowerings.shared.launching.replaying import call_cache
from attn_compiler.lowerings.shared.ops import leaf_ops as ops
from attn_compiler.lowerings.shared.parts import tile_table
from attn_compiler.lowerings.shared.parts.kernel_plan import Call
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.masks import Causal, Dense, MaskSpec
from attn_compiler.spec.scores import Softcap
from attn_compiler.spec.target import Target
from tests.lowerings import kernel_problems
from tests.lowerings.kernel_cases import Case
from tests.lowerings.kernel_launches import launched
from tests.lowerings.kernel_problems import Problem, build, planned, results
from tests.lowerings.specs import BOTTOM_RIGHT, CAUSAL, bias, dense, make_spec, words

# What the kernels of one backward are told.

#: of what `started` was given: arguments and part
Started = list[tuple[Arguments, str]]


@pytest.fixture
def started() -> Started:
    """One backward, whose kernel was launched without and then with kept scores."""
    problem = build(Case(name="backward", bias="hqk"), device="cpu")
    found: Started = []

    def start(kernel: Any, same: Any, tensors: Any, arguments: Callable[[], Arguments], part: str) -> None:
        found.append((arguments(), part))

    with planned(problem.plan):
        prepared = prepare(problem.text)
        tensors = {"Q": problem.q, "K": problem.k, "V": problem.v, **prepared.named(problem.operands)}
        tensors |= {"GradOut": torch.zeros_like(problem.q), "Out": torch.zeros_like(problem.q)}
        tensors["RowStats"] = torch.zeros(*problem.q.shape[:2], 2, 128)
        same = call_cache("op_backward", problem.text, (problem.q, problem.k, problem.v))
        shared = Backward(prepared=prepared, same=same, tensors=tensors, start=start)
        shared.launch("kernel", _arguments, "all")
        tensors["Scores"] = torch.zeros(2, 2, 70, 80)
        shared.launch("kernel", _arguments, "scores")
    assert len(shared.ran) == 2
    return found


def _arguments(shared: Backward) -> Arguments:
    return Arguments(
        grid=(1, 1, 1), tensors=shared.parameters("GradQ") | shared.scores, numbers=shared.numbers() | shared.pitch
    )


def test_a_launch_is_told_tensors_and_numbers(started: Started) -> None:
    told, part = started[0]
    assert part == "all"
    assert {"Q", "K", "V", "GradOut", "RowStats", "GradQ"} <= set(told.tensors)
    assert "GradK" not in told.tensors
    assert told.tensors["Scores"] is None
    assert (told.numbers["stats_rows"], told.numbers["pitch"]) == (128, 0)


def test_scores_that_are_kept_have_their_parameter(started: Started) -> None:
    told, part = started[1]
    assert part == "scores"
    assert (told.tensors["Scores"], told.numbers["pitch"]) == ("Scores", 80)


# What a backward of our kernels allocates, hands on and copies.
BIASED = Case(name="backward_call", bias="hqk")


class Kernels:
    """A backward whose only launch fills the gradients of q, k and v with numbers. seen: what is shared, of each run."""

    def __init__(self) -> None:
        self.seen: list[Backward] = []

    def body(self, together: int = 64) -> BackwardByKernels:
        return BackwardByKernels(
            op="op_backward",
            operands=lambda prepared: prepared.operands,
            rows_together=lambda prepared: together,
            start=self._start,
            make_room=lambda shared: None,
            run=self._run,
        )

    def _start(self, kernel: Any, same: Any, tensors: Any, arguments: Callable[[], Arguments], part: str) -> None:
        for i, name in enumerate(("GradQ", "GradK", "GradV")):
            tensors[name].fill_(i + 1)

    def _run(self, shared: Backward) -> list[Tensor]:
        self.seen.append(shared)
        shared.launch("kernel", lambda shared: Arguments(grid=(1, 1, 1), tensors={}, numbers={}))
        return [torch.full_like(shared.tensors["bias"], 4.0)]


def _given(problem: Problem, **changed: Tensor) -> tuple[Any, ...]:
    out = torch.zeros(problem.q.shape[:3] + problem.v.shape[3:])
    lse = torch.zeros(problem.q.shape[:3])
    given = {
        "grad_out": torch.ones_like(out),
        "grad_lse": torch.zeros_like(lse),
        "q": problem.q,
        "k": problem.k,
        "v": problem.v,
    }
    given |= changed
    return (*given.values(), problem.operands, out, lse, problem.text)


def _call(problem: Problem, kernels: Kernels, together: int = 64, **changed: Tensor) -> Any:
    with planned(problem.plan), torch.no_grad():
        return kernels.body(together)(*_given(problem, **changed))


def test_gradients_lie_as_what_they_are_of() -> None:
    problem, kernels = build(BIASED, device="cpu"), Kernels()
    *grads, further = _call(problem, kernels)
    for i, (grad, x) in enumerate(zip(grads, (problem.q, problem.k, problem.v), strict=True)):
        assert (grad.shape, grad.dtype) == (x.shape, x.dtype)
        assert (grad == i + 1).all()
    assert [x.shape for x in further] == [problem.named["bias"].shape]


@pytest.mark.parametrize(
    ("queries", "together", "rows"), [(0, 64, 64), (1, 64, 64), (64, 64, 64), (65, 64, 128), (70, 48, 96)]
)
def test_row_stats_are_whole_blocks_and_one_at_least(queries: int, together: int, rows: int) -> None:
    kernels = Kernels()
    problem = build(Case(name=f"backward_call_{queries}", seqlen_q=queries, bias="hqk"), device="cpu")
    _call(problem, kernels, together)
    (shared,) = kernels.seen
    assert shared.tensors["RowStats"].shape == (2, 2, 2, rows)


@pytest.mark.parametrize("name", ["q", "grad_out"])
def test_what_kernels_can_not_read_is_copied(name: str) -> None:
    """An upstream gradient of a sum is one number that is expanded."""
    problem, kernels = build(BIASED, device="cpu"), Kernels()
    like = problem.q if name == "q" else _given(problem)[0]
    spread = torch.tensor(3.0).expand(like.shape)
    *grads, _ = _call(problem, kernels, **{name: spread})
    (shared,) = kernels.seen
    held = shared.tensors["Q" if name == "q" else "GradOut"]
    assert held.stride(-1) == 1
    assert torch.equal(held, spread)
    assert shared.tensors["K"].data_ptr() == problem.k.data_ptr()
    assert grads[0].is_contiguous() or name != "q"


def test_a_gradient_of_the_lse_that_is_no_packed_one_is_copied_and_not_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, kernels = build(BIASED, device="cpu"), Kernels()
    kept: list[Any] = []
    monkeypatch.setattr(replaying.CallCache, "keep", lambda *given, **named: kept.append(named))
    _call(problem, kernels, grad_lse=torch.tensor(2.0).expand(problem.q.shape[:3]))
    assert kernels.seen[0].tensors["GradLse"].is_contiguous()
    assert (kernels.seen[0].tensors["GradLse"] == 2).all()
    assert kept == []
    _call(problem, kernels)
    (named,) = kept
    assert named["inputs"][:3] == ("GradOut", "GradLse", "Q")
    assert named["returned"] == ("GradQ", "GradK", "GradV", ["GradBias"])


# What the kernels of gradients are launched with, for whichever family asks.
@pytest.mark.parametrize("tiles", [(32, 128), (128, 32)], ids=["dq_small", "dq_large"])
def test_every_block_of_every_pass_finds_row_stats(tiles: tuple[int, int]) -> None:
    problem = build(Case(name="row_stats", seqlen_q=130, grad_kv=(tiles[1], 32)))
    call = Call.from_text(problem.text)
    small = dataclasses.replace(call.tiles.grad_q, queries=tiles[0])
    call = dataclasses.replace(call, tiles=dataclasses.replace(call.tiles, grad_q=small))
    problem = dataclasses.replace(problem, text=call.to_text())
    found = launched(problem)
    for name in ("attention_grad_q", "attention_grad_kv"):
        assert found[name].numbers["stats_rows"] == 256
    assert found["attention_grad_q"].numbers["ROUND"] == 128
    kernel_problems.assert_within_rule(results(problem), problem)


@pytest.mark.parametrize(
    ("axes", "batch", "head_dim", "expected"),
    [("hqk", 3, 64, True), ("hqk", 3, 80, False), ("hqk", 1, 64, False), ("bhqk", 3, 64, False), ("qk", 3, 64, False)],
)
def test_batch_rows_that_share_a_bias_follow_each_other(axes: str, batch: int, head_dim: int, expected: bool) -> None:
    case = Case(name="heads_last", batch=batch, heads_q=4, heads_kv=2, head_dim=head_dim, bias=axes, bias_grad=False)
    found = launched(build(case))
    for name, heads in (("attention_forward", 4), ("attention_grad_q", 4), ("attention_grad_kv", 2)):
        assert found[name].numbers["HEADS_LAST"] == expected
        assert found[name].grid[1:] == ((batch, heads) if expected else (heads, batch))


@pytest.mark.parametrize(("last", "grid"), [(False, (5, 8, 3)), (True, (5, 3, 8))])
def test_the_last_axis_of_a_grid_is_the_slowest(last: bool, grid: tuple[int, int, int]) -> None:
    assert gradient_launch.grid(5, 8, 3, last) == grid


def test_each_of_the_two_gradients_of_a_pass_over_keys_can_be_left_out() -> None:
    problem = build(Case(name="apart", grad_kv=(32, 32)))
    call = Call.from_text(problem.text)
    apart = dataclasses.replace(call.tiles, grad_kv=dataclasses.replace(call.tiles.grad_kv, apart=True))
    text = dataclasses.replace(call, tiles=apart).to_text()
    both, last = (launched(each)["attention_grad_kv"] for each in (problem, dataclasses.replace(problem, text=text)))
    assert (both.numbers["FOR_K"], both.numbers["FOR_V"]) == (True, True)
    # Of the two launches the second one, which is for v.
    assert (last.numbers["FOR_K"], last.numbers["FOR_V"]) == (False, True)


def test_a_program_for_each_head_sums_the_gradient_of_its_sink() -> None:
    found = launched(build(Case(name="sinks", sinks=True, batch=3, heads_q=4, heads_kv=2, seqlen_q=130)))
    asked = found["attention_grad_sinks"]
    assert asked.grid == (4, 1, 1)
    numbers = {name: asked.numbers[name] for name in ("batch_size", "heads_q", "stats_rows", "BLOCK")}
    assert numbers == {"batch_size": 3, "heads_q": 4, "stats_rows": 192, "BLOCK": STATS_BLOCK}


H200 = Target.fake(sm=90)


@pytest.mark.parametrize("mask", [MaskSpec(), CAUSAL], ids=["full", "causal"])
def test_it_serves_what_cudnn_does(mask: MaskSpec) -> None:
    assert cudnn_backward.why_not(make_spec(mask=mask), H200) == []


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (make_spec(changes=(Softcap(cap=30.0),)), "softcap"),
        (make_spec(mask=dense(2, 1, 128, 128)), "no tensor joins the scores"),
        (make_spec(mask=BOTTOM_RIGHT, seqlen_q=64), "top left"),
        (make_spec(dropout_p=0.1), "no dropout"),
    ],
    ids=["softcap", "mask", "bottom right", "dropout"],
)
def test_what_it_refuses(spec: AttentionSpec, reason: str) -> None:
    assert reason in words(cudnn_backward.why_not(spec, H200))


def test_gradients_lie_as_q_k_and_v_do() -> None:
    spec = make_spec(mask=CAUSAL)
    text = Call(spec=spec, tiles=tile_table.tiles(spec, H200)).to_text()
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 128, heads, 64, dtype=torch.bfloat16).transpose(1, 2) for heads in (8, 2, 2))
        out, lse = torch.empty_like(q), torch.empty(2, 8, 128)
        op = torch.ops.attn_compiler.sdpa_cudnn_backward
        *gradients, further = op(out, lse, q, k, v, [], out, lse, text)
        assert [x.stride() for x in gradients] == [q.stride(), k.stride(), v.stride()]
        assert further == []


def test_graphs_are_its_own_and_read_one_layout() -> None:
    """PyTorch tells graphs apart by the bits of dropout's probability, and not by how out and its gradient lie."""
    spec = make_spec(mask=CAUSAL)
    text = Call(spec=spec, tiles=tile_table.tiles(spec, H200)).to_text()
    q = torch.zeros(2, 8, 128, 64, dtype=torch.bfloat16)
    nothing = (q, q, q)
    with mock.patch.object(
        torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward", return_value=nothing
    ) as aten:
        cudnn_backward.gradients(q, q[..., 0], q, q, q, [], q, q[..., 0].float(), text)
    dropout = aten.call_args.args[13]
    assert dropout == 0
    assert math.copysign(1, dropout) == -1
    lies = cudnn_backward.grad_out_as_read(q)
    assert lies.stride() == ops.empty_outputs(q, q)[0].stride()


@pytest.mark.gpu
def test_after_a_backward_whose_output_lies_otherwise() -> None:
    """Of SDPA's own, with q, k and v as here: its output lies as q does, ours does not."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("hopper_fp8 is for sm90")
    torch.manual_seed(0)
    tensors = [torch.randn(2, 4, 512, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    upstream = torch.randn_like(tensors[0])
    exact = [x.detach().float().requires_grad_() for x in tensors]
    right = torch.autograd.grad(_causal(*exact), exact, upstream.float())
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        usual = torch.autograd.grad(_causal(*tensors), tensors, upstream)
    options = {"fp8_recipe": Fp8Recipe(), "lowering": "hopper_fp8", "inner": "aot_eager", "strict": True}
    compiled = torch.compile(_causal, backend="attn_compiler", options=options)
    for gradients, most in ((usual, 0.01), (torch.autograd.grad(compiled(*tensors), tensors, upstream), 0.08)):
        for found, wanted in zip(gradients, right, strict=True):
            assert float((found.float() - wanted).norm()) < most * float(wanted.norm())


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


# `sdpa_cudnn` and the backward for other forwards ask the same.
ANY_H200 = Target.fake()


@pytest.mark.parametrize(
    ("given", "target"),
    [
        ({}, ANY_H200),
        ({"mask": CAUSAL}, ANY_H200),
        ({"dtype": "float32"}, ANY_H200),
        ({"head_dim": 7}, ANY_H200),
        ({"dropout_p": 0.1}, ANY_H200),
        ({}, Target.fake(sm=75)),
        ({}, Target.fake(cudnn=0)),
        ({}, Target.fake(disabled=frozenset({"cudnn"}))),
        ({}, Target.fake(deterministic=True)),
        ({"device": "cpu"}, ANY_H200),
    ],
    ids=str,
)
def test_the_forward_and_the_backward_refuse_alike(given: dict[str, Any], target: Target) -> None:
    spec = make_spec(**given)
    found = cudnn_called.why_not(spec, target)
    assert by_name("sdpa_cudnn").why_not(spec, target) == found
    assert cudnn_backward.why_not(spec, target)[: len(found)] == found


def test_the_backward_refuses_what_its_forward_would_hand_over() -> None:
    spec = make_spec(changes=(bias(1, 8, 256, 256),), seqlen_q=256, seqlen_kv=256, dropout_p=0.125)
    more = cudnn_backward.why_not(spec, ANY_H200)[len(cudnn_called.why_not(spec, ANY_H200)) :]
    assert [reason.rule.partition(":")[0] for reason in more] == ["no tensor joins the scores", "no dropout"]


def test_a_machine_that_cannot_run_it_is_judged_alone() -> None:
    (reason,) = cudnn_called.why_not(make_spec(dtype="float32", dropout_p=0.3), Target.fake(sm=75))
    assert "sm75" in reason.observed


def test_a_diagonal_is_told_as_a_flag_where_the_flag_serves() -> None:
    tensor = Dense(shape=(2, 1, 256, 256), dtype="bool")
    spec = make_spec(mask=MaskSpec(kinds=(Causal(),), dense=tensor), seqlen_q=256, seqlen_kv=256)
    assert cudnn_called.with_flag(spec, ANY_H200).mask.dense is None
    # With a flag it refuses a site with dropout as it does without, so the site is told as it is.
    refused = make_spec(mask=spec.mask, seqlen_q=256, seqlen_kv=256, dropout_p=0.1)
    assert cudnn_called.with_flag(refused, ANY_H200) is refused


def test_unequal_head_dims_of_unknown_sizes_wait_for_torch_2_13() -> None:
    spec = make_spec(head_dim=128, head_dim_v=64, seqlen_q="s0", seqlen_kv="s1")
    assert "before torch 2.13" in words(cudnn_called.why_not(spec, Target.fake(torch="2.12.0")))
    assert "before torch 2.13" not in words(cudnn_called.why_not(spec, Target.fake(torch="2.13.0")))
