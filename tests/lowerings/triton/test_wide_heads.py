"""Head dims of 257 to 512, with the table's tiles of each machine: outputs and all gradients in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attn_compiler.lowerings.shared.parts.kernel_plan import Band, Call
from attn_compiler.spec.target import Target
from tests.lowerings import kernel_problems
from tests.lowerings.kernel_cases import BOTTOM_RIGHT, CAUSAL, Case
from tests.lowerings.kernel_launches import launched
from tests.lowerings.kernel_problems import Problem, build, results

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the same cases run on the GPU")

#: of each row of the table for these head dims
MACHINES = (80, 89, 90, 100)

_SHORT = (
    Case(name="wide_causal_512", head_dim=512, band=CAUSAL, heads_q=4, heads_kv=1, batch=1),
    Case(name="wide_more_queries_384", head_dim=384, band=BOTTOM_RIGHT, seqlen_kv=37),
    Case(name="wide_full_320_257", head_dim=320, head_dim_v=257, seqlen_q=33, seqlen_kv=101),
    Case(name="wide_257_64", head_dim=257, head_dim_v=64, band=CAUSAL, batch=1),
    Case(name="wide_window_sinks_512", head_dim=512, band=Band(left=20, right=0), sinks=True, heads_q=4, heads_kv=2),
    Case(name="wide_softcap_512", head_dim=512, softcap=2.0, keys="left", band=CAUSAL),
    Case(name="wide_keys_none_512", head_dim=512, keys="none", sinks=True),
    Case(name="wide_documents_384", head_dim=384, documents=True, band=CAUSAL),
    Case(name="wide_rows_slopes_320", head_dim=320, rows=True, slopes=True),
    Case(name="wide_bias_keys_512", head_dim=512, bias="hqk", bias_grad=False, keys="right"),
    Case(name="wide_distances_320", head_dim=320, distances=2, needs_grad=False),
    Case(name="wide_dropout_512", head_dim=512, dropout_p=0.3, band=CAUSAL, batch=1),
    Case(name="wide_one_query_512", head_dim=512, seqlen_q=1, layout="bhsd"),
    Case(name="wide_layout_slice_264", head_dim=264, layout="slice", band=CAUSAL),
    Case(name="wide_layout_joined_512", head_dim=512, layout="sb(h+2hg)d", heads_q=3, band=CAUSAL, batch=3),
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
    problem = build(Case(name="alone", head_dim=512, band=CAUSAL), dtype=torch.float16, target=Target.fake(sm=80))
    assert launched(problem)["attention_grad_q"].numbers["TOGETHER"] == 1
