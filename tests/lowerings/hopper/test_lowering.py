"""What the lowering puts into a graph, on a machine that is not there; and its ops."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load
from attn_compiler.lowerings.base import Operands
from attn_compiler.lowerings.hopper import added, mask_bits
from attn_compiler.lowerings.hopper.call import call_of
from attn_compiler.lowerings.hopper.lowering import HopperAttention
from attn_compiler.lowerings.hopper.ops import given_op, grad_operands
from attn_compiler.lowerings.hopper.plan import blocks_of
from attn_compiler.lowerings.shared.calls import tables as _registers_gathered  # noqa: F401
from attn_compiler.lowerings.shared.parts import tile_table
from attn_compiler.lowerings.shared.parts.kernel_plan import Band, Call, Plan
from attn_compiler.passes.graph import gradient_runs
from attn_compiler.reasons.codes import Code
from attn_compiler.spec.attention import LseUse
from attn_compiler.spec.masks import KeyPadding
from attn_compiler.spec.target import Target
from tests.lowerings import emitting, kernel_problems
from tests.lowerings.kernel_cases import BY_NAME, Case
from tests.lowerings.specs import CAUSAL, bias, dense, make_spec

# What the lowering puts into a graph, on a machine that is not there.
HOPPER = HopperAttention()
H200 = Target.fake()
DETERMINISTIC = Target.fake(deterministic=True)
_OF_KEY = Load("mask", (Index("b"), ix.ZERO, ix.ZERO, Index("k")), "bool")


def _emitted(
    target: Target = H200, *, needs_grad: bool, seqlen: int = 2048, lse: LseUse = "unread"
) -> tuple[list[str], list[str]]:
    """Names of what the lowering calls of ours, in order, and what it tells people."""
    sizes: dict[str, Any] = {"seqlen_q": seqlen, "seqlen_kv": seqlen, "heads": 16, "head_dim": 128}
    spec = make_spec(mask=CAUSAL, **sizes, needs_grad=needs_grad, lse=lse)
    graph = fx.Graph()
    emitter = emitting.GraphEmitter(graph, target)
    nodes = []
    for name in "qkv":
        node = graph.placeholder(name)
        shape = (2, 16 if name == "q" else 8, seqlen, 128)
        node.meta["example_value"] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        nodes.append(node)
    emit = HOPPER.emit if lse == "unread" else HOPPER.emit_with_lse
    emit(emitter, call_of(spec, target), Operands(q=nodes[0], k=nodes[1], v=nodes[2]))
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [name.split(".")[1] for name in names if name.startswith("attn_compiler.")], emitter.notes


def test_without_gradients_there_is_the_leaf_op_alone() -> None:
    assert _emitted(needs_grad=False) == (["hopper"], [])
    assert _emitted(DETERMINISTIC, needs_grad=False) == (["hopper"], [])


def test_with_gradients_another_op_hands_on_what_it_computed() -> None:
    assert _emitted(needs_grad=True) == (["hopper", "hopper_hopper_given"], ["backward: hopper"])


def test_the_lse_is_handed_on_with_its_gradient() -> None:
    assert _emitted(needs_grad=False, lse="read") == (["hopper"], [])
    assert _emitted(needs_grad=True, lse="differentiated") == (["hopper", "hopper_hopper_given"], ["backward: hopper"])
    assert _emitted(needs_grad=True, lse="merged") == (["hopper", "hopper_hopper_part_given"], ["backward: hopper"])


def _emitted_with(
    tensor: torch.Tensor, *, needs_grad: bool, length: int = 256, head_dim: int = 64, **given: Any
) -> tuple[fx.Graph, list[fx.Node]]:
    """The graph, and the operands of the leaf op."""
    spec = make_spec(seqlen_q=length, seqlen_kv=length, head_dim=head_dim, needs_grad=needs_grad, **given)
    graph = fx.Graph()
    emitter = emitting.GraphEmitter(graph, H200)
    nodes = {name: graph.placeholder(name) for name in ("q", "k", "v", "mask")}
    for name in "qkv":
        nodes[name].meta["example_value"] = torch.empty(2, 8, length, head_dim, dtype=torch.bfloat16, device="meta")
    nodes["mask"].meta["example_value"] = tensor
    HOPPER.emit(emitter, call_of(spec, H200), Operands(**nodes, loads={"mask": nodes["mask"]}))
    (call,) = (node for node in graph.nodes if node.target is torch.ops.attn_compiler.hopper.default)
    return graph, list(call.args[3])


def _bias(*, keys_first: bool = False) -> torch.Tensor:
    found = torch.empty(1, 8, 256, 256, dtype=torch.bfloat16, device="meta")
    return found.transpose(2, 3) if keys_first else found


def test_a_bias_is_read_where_it_is() -> None:
    graph, (own, read) = _emitted_with(_bias(), needs_grad=False, changes=(bias(1, 8, 256, 256),))
    assert own is read
    assert not [node for node in graph.nodes if node.target is torch.clone]


def test_a_bias_whose_keys_are_no_neighbours_is_copied() -> None:
    """Once, into rows that both families' kernels load vectors of."""
    graph, (own, read) = _emitted_with(_bias(keys_first=True), needs_grad=False, changes=(bias(1, 8, 256, 256),))
    assert own is read
    assert [node.target for node in graph.nodes].count(torch.ops.aten.slice_scatter.default) == 1
    assert added.is_readable(read.meta["example_value"])


def test_a_learned_bias_gets_its_gradient_from_the_triton_kernels() -> None:
    graph, _ = _emitted_with(_bias(), needs_grad=True, changes=(bias(1, 8, 256, 256),))
    (call,) = (node for node in graph.nodes if node.target is torch.ops.attn_compiler.hopper_triton_given.default)
    assert call.args[3][-1].name == "mask"


def test_a_dense_mask_is_read_as_bits() -> None:
    mask = torch.empty(2, 1, 256, 256, dtype=torch.bool, device="meta")
    _, operands = _emitted_with(mask, needs_grad=False, mask=dense(2, 1, 256, 256))
    assert [tuple(node.meta["example_value"].shape) for node in operands[::2]] == [(2, 1, 256, 256), (2, 1, 256, 16)]


def test_the_backward_of_a_dense_mask_reads_bits_of_queries() -> None:
    mask = torch.empty(2, 1, 256, 256, dtype=torch.bool, device="meta")
    graph, _ = _emitted_with(mask, needs_grad=True, mask=dense(2, 1, 256, 256))
    (call,) = (node for node in graph.nodes if node.target is torch.ops.attn_compiler.hopper_hopper_given.default)
    assert call.args[3][-1].meta["example_value"].shape == (2, 1, 256, 16)


def test_the_backward_of_wide_heads_reads_lists_of_both() -> None:
    """dq has a pass of its own, over keys. Padding is a mask of each key."""
    padding = torch.empty(2, 1, 1, 2048, dtype=torch.bool, device="meta")
    mask = dataclasses.replace(dense(2, 1, 1, 2048), kinds=(KeyPadding(condition=ix.as_bool(_OF_KEY)),))
    graph, forward = _emitted_with(padding, needs_grad=True, mask=mask, length=2048, head_dim=512, dtype="bfloat16")
    (call,) = (node for node in graph.nodes if node.target is torch.ops.attn_compiler.hopper_hopper_given.default)
    spec = Call.from_text(call.args[4]).spec
    names = grad_operands(spec)
    assert {"tiles", "tiles_by_key"} <= set(names)
    # Behind the results, and q, k and v.
    given = call.args[3][5:]
    assert len(given) == len(names)
    # That of the forward is read again: it is made for the same blocks.
    assert given[names.index("tiles")] is forward[-1].args[0]
    # Of 16 blocks of 128 keys, and one more, up to 32 tiles of 64 queries.
    by_key = given[names.index("tiles_by_key")].meta["example_value"]
    assert by_key.shape == (2, 1, 2048 // 128 + 1, 2048 // 64 + 4)


def test_the_report_says_which_deterministic_backward_there_is_and_why() -> None:
    calls, notes = _emitted(DETERMINISTIC, needs_grad=True, seqlen=8192)
    assert calls == ["hopper", "hopper_hopper_in_order_given"]
    assert notes == ["backward: hopper_in_order"]
    calls, (note,) = _emitted(DETERMINISTIC, needs_grad=True, seqlen=512)
    assert calls == ["hopper", "hopper_triton_given"]
    assert note.startswith("backward: triton; hopper_in_order: the backward that adds up in one order was measured")
    assert note.endswith(f"({Code.IN_ORDER_SLOWER})")


def test_the_output_counts_as_saved() -> None:
    """By the op that hands it on, and that compiled code is without."""
    mode = FakeTensorMode()
    graph = fx.Graph()
    emitter = emitting.GraphEmitter(graph, H200)
    nodes = []
    for name in "qkv":
        node = graph.placeholder(name)
        with mode:
            node.meta["example_value"] = torch.empty(2, 8, 2048, 128, dtype=torch.bfloat16).requires_grad_()
        nodes.append(node)
    spec = make_spec(mask=CAUSAL, seqlen_q=2048, seqlen_kv=2048, head_dim=128)
    with mode:
        out = HOPPER.emit(emitter, call_of(spec, H200), Operands(q=nodes[0], k=nodes[1], v=nodes[2]))
        other = emitter.call(torch.neg, out)
    emitted = [node for node in graph.nodes if node.op == "call_function"]
    ran = gradient_runs.run_on_fakes(emitted, mode)
    assert ran is not None
    assert ran.saves(out)
    assert not ran.saves(other)


def test_tiles_of_the_text_are_the_triton_familys() -> None:
    spec = make_spec(mask=CAUSAL, dtype="bfloat16", seqlen_q=2048, seqlen_kv=2048, head_dim=128)
    call = Call(spec=spec, tiles=tile_table.tiles(spec, H200))
    assert Call.from_text(call.to_text()) == call
    assert blocks_of(spec).tile != call.tiles.forward


# The ops that hand on what Hopper's leaf op computed, with each family's backward.
def test_each_family_has_an_op() -> None:
    for family in ("hopper", "hopper_in_order", "triton", "sdpa_cudnn"):
        assert hasattr(torch.ops.attn_compiler, given_op(family))


def test_gradients_are_the_triton_familys() -> None:
    problem = kernel_problems.build(BY_NAME["causal"])
    leaves = [problem.q, problem.k, problem.v]
    with kernel_problems.planned(problem.plan):
        out, lse = kernel_problems.outputs(problem)
        upstream = torch.randn_like(out)
        wanted = torch.autograd.grad(out, leaves, upstream)
        kept = [x.detach() for x in (out, lse, *leaves)]
        operands = [*kept, *problem.operands]
        handed = torch.ops.attn_compiler.hopper_triton_given(*leaves, operands, problem.text)[0]
        found = torch.autograd.grad(handed, leaves, upstream)
    torch.testing.assert_close(handed, out)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("part", ["triton_part", "hopper_triton_part_given"])
def test_a_part_gets_minus_delta_in_place_of_its_own_output(part: str) -> None:
    problem = kernel_problems.build(BY_NAME["causal"])
    leaves = [problem.q, problem.k, problem.v]
    ours = torch.ops.attn_compiler
    with kernel_problems.planned(problem.plan):
        out, lse = kernel_problems.outputs(problem)
        upstream, of_lse = torch.randn_like(out), torch.randn_like(lse)
        wanted = torch.autograd.grad((out, lse), leaves, (upstream, of_lse))
        minus_delta = of_lse - (out.detach() * upstream).sum(-1)
        if part == "triton_part":
            handed = ours.triton_part(*leaves, problem.operands, problem.text)
        else:
            kept = [x.detach() for x in (out, lse, *leaves)]
            handed = getattr(ours, part)(*leaves, [*kept, *problem.operands], problem.text)
        found = torch.autograd.grad(handed, leaves, (upstream, minus_delta))
    torch.testing.assert_close(handed[0], out)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


_SIZES: Any = {"heads_q": 4, "heads_kv": 2, "band": Band(right=0)}


@pytest.mark.in_turns(4)
@pytest.mark.parametrize(
    "case",
    [
        Case(name="hopper given, odd lengths", seqlen_q=333, seqlen_kv=301, **_SIZES),
        Case(name="hopper given, window", seqlen_q=260, seqlen_kv=260, **_SIZES | {"band": Band(left=77, right=0)}),
        Case(name="hopper given, padding", seqlen_q=390, seqlen_kv=390, keys="left", **_SIZES),
        Case(name="hopper given, documents", seqlen_q=270, seqlen_kv=270, documents=True, **_SIZES),
        # With padding dq of wide heads reads lists of keys, and dk and dv lists of queries.
        Case(name="hopper given, wide", seqlen_q=150, seqlen_kv=150, **_SIZES | {"head_dim": 320}),
        Case(
            name="hopper given, wide and padded", keys="left", seqlen_q=150, seqlen_kv=150, **_SIZES | {"head_dim": 320}
        ),
    ],
    ids=lambda case: case.name.removeprefix("hopper given, "),
)
def test_gradients_come_through_the_op_that_autograd_calls(case: Case) -> None:
    """Narrow heads in one order: as many programs as run at once, under the switch itself. Memory that nobody wrote to then holds the
    largest number, which no counter reaches."""
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
    from attn_compiler.lowerings.hopper import backward_launch
    from tests.lowerings.hopper import problems

    problem, in_order = problems.build(case), case.head_dim < 256
    out, lse = problems.outputs(problem)
    body, family = (backward_launch.gradients_in_order, "in_order_") if in_order else (backward_launch.gradients, "")

    def on_a_cpu(*given: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        with problems.emulated(problem, programs=5 if in_order else 3, together=in_order):
            return body(*given)

    leaves = [problem.q, problem.k, problem.v]
    operands = [x.detach() for x in (out, lse, *leaves, *problems.grad_operands(problem))]
    torch.use_deterministic_algorithms(in_order)
    try:
        with torch.library._scoped_library("attn_compiler", "FRAGMENT") as library:
            library.impl(f"hopper_{family}backward", on_a_cpu, "CPU")
            with kernel_problems.planned(problem.plan):
                given = getattr(torch.ops.attn_compiler, f"hopper_hopper_{family}given")
                handed = given(*leaves, operands, problem.text)
                upstream = kernel_problems.upstream(problem, out, lse)
                times = range(2 if in_order else 1)
                runs = [torch.autograd.grad(handed, leaves, upstream, retain_graph=True) for _ in times]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[-1], strict=True))
    kernel_problems.assert_within_rule([*handed, *runs[0]], problem)


# A dense mask as bits.
@pytest.mark.parametrize("shape", [(2, 3, 5, 70), (1, 1, 4, 512), (1, 2, 1, 513), (2, 1, 7, 1)])
def test_each_pair_has_its_bit(shape: tuple[int, ...]) -> None:
    emitter: Any = kernel_problems.Eager()
    mask = torch.rand(shape) < 0.5
    seqlen = 100 if shape[3] == 1 else shape[3]
    words = mask_bits.emit(emitter, mask, seqlen)
    assert words.dtype == torch.int32
    assert words.shape[:3] == shape[:3]
    assert words.shape[3] % 16 == 0
    assert words.is_contiguous()
    found = (words[..., None] >> torch.arange(32, dtype=torch.int32)) & 1
    assert torch.equal(found.flatten(3)[..., :seqlen] != 0, mask.expand(*shape[:3], seqlen))
    assert not found.flatten(3)[..., seqlen:].any()


def test_bits_of_queries_by_key() -> None:
    emitter: Any = kernel_problems.Eager()
    mask = torch.rand(2, 1, 70, 130) < 0.5
    words = mask_bits.emit_by_key(emitter, mask, 70)
    assert torch.equal(words, mask_bits.emit(emitter, mask.transpose(2, 3).contiguous(), 70))
    assert words.shape == (2, 1, 130, 16)


def test_what_has_the_operand() -> None:
    assert mask_bits.is_there(Plan(mask=True))
    assert not mask_bits.is_there(Plan(keys=True))
