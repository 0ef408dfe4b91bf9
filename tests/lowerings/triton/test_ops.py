"""The Triton family's ops, and heads too wide for one tile."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.shared.parts import site_parts as parts
from attn_compiler.lowerings.shared.parts.kernel_plan import Band, Call
from attn_compiler.spec.target import Target
from tests.lowerings import kernel_problems
from tests.lowerings.kernel_cases import BOTTOM_RIGHT, CAUSAL as WIDE_CAUSAL, Case
from tests.lowerings.kernel_launches import launched
from tests.lowerings.kernel_problems import DEVICE, Problem, build, planned, results
from tests.passes.compiling import compiled, mark

# The leaf op of the Triton kernels as PyTorch sees it.
CAUSAL = Case(name="causal", batch=1, seqlen_q=37, seqlen_kv=37, band=Band(right=0))
PADDED = Case(name="padded", seqlen_q=37, seqlen_kv=37, band=Band(right=0), keys="left", bias="hqk", sinks=True)


def problem_of(case: Case) -> Problem:
    """Without NaN in the padding: opcheck compares a tensor with itself."""
    problem = build(case)
    k, v = (x.detach().nan_to_num(0.0).requires_grad_() for x in (problem.k, problem.v))
    return dataclasses.replace(problem, k=k, v=v)


@pytest.mark.parametrize("case", [CAUSAL, PADDED], ids=lambda case: case.name)
def test_opcheck(case: Case) -> None:
    problem = problem_of(case)
    with planned(problem.plan):
        arguments = (problem.q, problem.k, problem.v, problem.operands, problem.text)
        torch.library.opcheck(torch.ops.attn_compiler.triton.default, arguments)


@pytest.mark.parametrize("case", [CAUSAL, PADDED], ids=lambda case: case.name)
def test_opcheck_of_the_backward(case: Case) -> None:
    problem = problem_of(case)
    out, lse = (x.detach() for x in kernel_problems.outputs(problem))
    given = [x.detach() for x in (problem.q, problem.k, problem.v)]
    operands = [x.detach() for x in problem.operands]
    grad_lse = torch.zeros_like(lse)
    with planned(problem.plan):
        arguments = (torch.ones_like(out), grad_lse, *given, operands, out, lse, problem.text)
        torch.library.opcheck(torch.ops.attn_compiler.triton_backward.default, arguments)


def test_operands_with_gradients_are_those_of_the_plan() -> None:
    problem = build(PADDED)
    with planned(problem.plan):
        wanted = parts.differentiable(problem.operands, problem.text)
        assert [name for name, is_wanted in zip(problem.plan.operands, wanted, strict=True) if is_wanted] == [
            "bias",
            "sinks",
        ]
        with pytest.raises(ValueError, match="keys, tiles, tiles_by_key, bias, sinks; got 4"):
            parts.differentiable(problem.operands[1:], problem.text)


# ---- symbolic sizes -----------------------------------------------------------------------------------------------


def padded(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """Causal from the end, and a padding mask as tokenizers make it."""
    seqlen_q, seqlen_kv = q.shape[2], k.shape[2]
    queries = torch.arange(seqlen_q, device=q.device)[:, None] + (seqlen_kv - seqlen_q)
    mask = (torch.arange(seqlen_kv, device=q.device) <= queries) & padding[:, None, None, :].bool()
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def causal(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def tensors(seqlen_q: int, seqlen_kv: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seqlen_q)
    q, k, v = (torch.randn(2, n, 2, 16, generator=generator) for n in (seqlen_q, seqlen_kv, seqlen_kv))
    padding = torch.ones(2, seqlen_kv, dtype=torch.int64)
    padding[0, -3:] = 0
    leaves = [x.to(DEVICE).transpose(1, 2).requires_grad_() for x in (q, k, v)]
    return [*leaves, padding.to(DEVICE)]


@pytest.mark.parametrize("function", [causal, padded])
def test_one_graph_for_every_length_forward_and_backward(function: object) -> None:
    model = compiled(function, lowering="triton", verify=True)  # type: ignore[arg-type]
    for lengths in ((40, 71), (9, 21), (65, 130)):
        ours, theirs = ([mark(x, lengths) for x in tensors(*lengths)] for _ in range(2))
        found, expected = model(*ours), function(*theirs)  # type: ignore[operator]
        assert torch.allclose(found, expected, atol=1e-5)
        found.square().sum().backward()
        expected.square().sum().backward()
        for mine, right in zip(ours[:3], theirs[:3], strict=True):
            assert mine.grad is not None
            assert torch.allclose(mine.grad, right.grad, atol=1e-4)
    assert len(model.graphs) == 1
    assert "triton" in model.calls
    assert "scaled_dot_product_attention" not in model.calls


# Head dims of 257 to 512, with the table's tiles of each machine.
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the same cases run on the GPU")

#: of each row of the table for these head dims
MACHINES = (80, 89, 90, 100)

_SHORT = (
    Case(name="wide_causal_512", head_dim=512, band=WIDE_CAUSAL, heads_q=4, heads_kv=1, batch=1),
    Case(name="wide_more_queries_384", head_dim=384, band=BOTTOM_RIGHT, seqlen_kv=37),
    Case(name="wide_full_320_257", head_dim=320, head_dim_v=257, seqlen_q=33, seqlen_kv=101),
    Case(name="wide_257_64", head_dim=257, head_dim_v=64, band=WIDE_CAUSAL, batch=1),
    Case(name="wide_window_sinks_512", head_dim=512, band=Band(left=20, right=0), sinks=True, heads_q=4, heads_kv=2),
    Case(name="wide_softcap_512", head_dim=512, softcap=2.0, keys="left", band=WIDE_CAUSAL),
    Case(name="wide_keys_none_512", head_dim=512, keys="none", sinks=True),
    Case(name="wide_documents_384", head_dim=384, documents=True, band=WIDE_CAUSAL),
    Case(name="wide_rows_slopes_320", head_dim=320, rows=True, slopes=True),
    Case(name="wide_bias_keys_512", head_dim=512, bias="hqk", bias_grad=False, keys="right"),
    Case(name="wide_distances_320", head_dim=320, distances=2, needs_grad=False),
    Case(name="wide_dropout_512", head_dim=512, dropout_p=0.3, band=WIDE_CAUSAL, batch=1),
    Case(name="wide_one_query_512", head_dim=512, seqlen_q=1, layout="bhsd"),
    Case(name="wide_layout_slice_264", head_dim=264, layout="slice", band=WIDE_CAUSAL),
    Case(name="wide_layout_joined_512", head_dim=512, layout="sb(h+2hg)d", heads_q=3, band=WIDE_CAUSAL, batch=3),
)
#: machines with little shared memory take no gradients of these
_MASKED = (
    Case(name="wide_mask_512", head_dim=512, mask="bqk"),
    Case(
        name="wide_all_masks_384", head_dim=384, band=Band(left=50, right=3), keys="holes", documents=True, mask="bhqk"
    ),
)


def _longer(case: Case) -> Case:
    """Long enough for several blocks of queries that share a list, and several tiles of keys."""
    return dataclasses.replace(case, seqlen_q=max(case.seqlen_q, 150)) if case.keys or case.documents else case


@pytest.mark.in_turns(2)
@interpreted
@pytest.mark.parametrize("sm", MACHINES)
@pytest.mark.parametrize("case", [*map(_longer, _SHORT), *_MASKED], ids=lambda case: case.name)
def test_attention_and_all_gradients(case: Case, sm: int) -> None:
    """In float16: the interpreter computes in no bfloat16, and the table has no tiles for float32."""
    needs_grad = case.needs_grad and not (case.mask and sm == 89)
    problem = build(dataclasses.replace(case, needs_grad=needs_grad), dtype=torch.float16, target=Target.fake(sm=sm))
    kernel_problems.assert_within_rule(results(problem), problem)


@pytest.mark.in_turns(3)
@interpreted
@pytest.mark.parametrize("case", _SHORT, ids=lambda case: case.name)
def test_in_full_precision(case: Case) -> None:
    """With small tiles: what float16 would hide."""
    problem = build(case)
    kernel_problems.assert_within_rule(results(problem), problem)


def _of_one_tensor(problem: Problem) -> Problem:
    """With keys that are the values; those of the forward, which must not be read, hold NaN."""
    call = dataclasses.replace(Call.from_text(problem.text), one_kv=True)
    return dataclasses.replace(problem, v=problem.k.detach().clone().requires_grad_(), text=call.to_text())


@pytest.mark.in_turns
@interpreted
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("case", [_SHORT[0], _SHORT[4], _SHORT[5], _MASKED[1]], ids=lambda case: case.name)
def test_keys_that_are_the_values_are_read_once(case: Case, sm: int) -> None:
    problem = _of_one_tensor(build(case, dtype=torch.float16, target=Target.fake(sm=sm)))
    found = results(problem)
    kernel_problems.assert_within_rule(found, problem)
    unread = dataclasses.replace(problem, v=torch.full_like(problem.k, torch.nan))
    assert torch.equal(kernel_problems.outputs(unread)[0], found[0])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [case for case in (*_SHORT, *_MASKED) if case.head_dim_v != 257 and case.head_dim != 257],
    ids=lambda c: c.name,
)
def test_on_a_gpu(case: Case) -> None:
    longer = (
        case if case.dropout_p else dataclasses.replace(case, seqlen_q=case.seqlen_q * 7, seqlen_kv=case.seqlen_kv * 7)
    )
    problem = build(longer, dtype=torch.bfloat16, target=Target.current("cuda"))
    kernel_problems.assert_within_rule(results(problem), problem)


@pytest.mark.parametrize(("sm", "together"), [(80, 2), (89, 2), (90, 2), (100, 1)])
def test_blocks_of_queries_of_the_gradient_share_the_forwards_lists(sm: int, together: int) -> None:
    case = Case(name="together", head_dim=512, keys="left", seqlen_q=150, seqlen_kv=70)
    problem = build(case, dtype=torch.float16, target=Target.fake(sm=sm))
    tiles = Call.from_text(problem.text).tiles
    assert tiles.forward.queries == together * tiles.grad_q.queries
    assert tiles.forward.keys == tiles.grad_q.keys
    assert launched(problem)["attention_grad_q"].numbers["TOGETHER"] == together


def test_without_lists_none_is_shared() -> None:
    problem = build(Case(name="alone", head_dim=512, band=WIDE_CAUSAL), dtype=torch.float16, target=Target.fake(sm=80))
    assert launched(problem)["attention_grad_q"].numbers["TOGETHER"] == 1
