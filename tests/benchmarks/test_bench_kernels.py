"""The cases are what they are called, ours and the peers compute them right (Triton in its interpreter), and rows say what happened."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from attn_compiler.lowerings.shared.calls.arguments import prepare
from attn_compiler.lowerings.shared.parts import site_parts as parts, tile_table
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from attn_compiler.lowerings.triton.lowering import TritonAttention
from attn_compiler.spec.target import Target
from benchmarks import bench_kernels, harness, kernel_cases, kernel_peers, kernel_timing, select_cases
from benchmarks.bench_select import Asked
from benchmarks.harness import BACKEND
from benchmarks.kernel_cases import CASES, PASSES, Case, Problem
from benchmarks.kernel_peers import Side
from tests.benchmarks.peer_stand_ins import stand_ins  # noqa: F401 - a fixture

BY_NAME = {case.name: case for case in CASES}
# One of each sort: the others differ from these in their sizes alone.
SORTS = (
    "padding_right padding_left documents documents_causal softcap sinks window bias_d64 alibi_d64 t5_d64 "
    "causal_d128_s8192 none_d256_s2048 causal_d72_s8192 causal_d192_128_s8192"
).split()


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small problems get lists of tiles as large ones do."""
    for limit in ("_FEW_QUERIES", "_FEW_KEYS"):
        monkeypatch.setattr(parts, limit, 0)
    parts.make_plan.cache_clear()
    prepare.cache_clear()
    yield
    parts.make_plan.cache_clear()
    prepare.cache_clear()


def problem_of(case: Case, *, training: bool = True) -> Problem:
    return kernel_cases.build(case, device="cpu", dtype=torch.float32, training=training)


def pairs_allowed(problem: Problem) -> Tensor:
    """bool (B, 1, S, S), pair by pair from the model's own tensors."""
    case, given = problem.case, problem.given
    q, k = torch.arange(case.seqlen)[:, None], torch.arange(case.seqlen)
    allowed = torch.ones(case.batch, 1, case.seqlen, case.seqlen, dtype=torch.bool)
    if case.causal:
        allowed &= k <= q
    if case.window is not None:
        allowed &= (q - k).abs() < case.window
    if "attention_mask" in given:
        allowed &= given["attention_mask"].bool()[:, None, None]
    if "ids" in given:
        allowed &= given["ids"][:, None, :, None] == given["ids"][:, None, None, :]
    return allowed


def attention(problem: Problem) -> Side:
    """By its definition."""
    case, given = problem.case, {name: x.detach() for name, x in problem.given.items()}
    q, k, v = (x.detach().requires_grad_(problem.training) for x in (problem.q, problem.k, problem.v))
    learned = [given[n].requires_grad_(problem.training) for n in ("bias", "table", "sinks") if n in given]

    def call() -> Tensor:
        keys, values = (x.repeat_interleave(case.heads_q // case.heads_kv, 1) for x in (k, v))
        distance = torch.arange(case.seqlen) - torch.arange(case.seqlen)[:, None]
        logits = q @ keys.mT * case.head_dim**-0.5
        if case.softcap is not None:
            logits = torch.tanh(logits / case.softcap) * case.softcap
        if case.bias:
            logits = logits + given["bias"]
        if case.alibi:
            logits = logits + given["slopes"][:, None, None] * distance
        if case.table:
            logits = logits + given["table"][distance + case.seqlen - 1].permute(2, 0, 1)
        allowed = pairs_allowed(problem)
        logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
        if case.sinks:
            logits = torch.cat([logits, given["sinks"][None, :, None, None].expand(*logits.shape[:3], 1)], -1)
        weights = logits.softmax(-1)[..., : case.seqlen]
        return weights.where(allowed.any(-1, keepdim=True), 0.0) @ values

    return Side(call=call, leaves=[q, k, v, *learned])


def outcome(side: Side, problem: Problem) -> list[Tensor]:
    """out and, with training, the gradients. A row that may use no key has no say."""
    out = side.call()
    used = kernel_cases.used_queries(problem.case)
    shown = [out.detach().where(used, 0.0)]
    if not problem.training:
        return shown
    return [*shown, *torch.autograd.grad(out, side.leaves, kernel_timing.gradient_of_out(problem))]


def test_names_are_unique_and_sizes_are_those_that_were_asked_for() -> None:
    assert len(BY_NAME) == len(CASES)
    for case in CASES:
        assert case.batch * case.seqlen == 16384
        assert case.heads_q % case.heads_kv == 0
        assert set(case.peers) <= set(kernel_peers.PEERS)
        if not case.name.startswith(("padding", "causal_d72", "causal_d80", "causal_d96", "causal_d1", "causal_d192")):
            assert case.heads_q * case.head_dim == 2048
    assert (BY_NAME["padding_left"].heads_q, BY_NAME["padding_left"].heads_kv) == (32, 8)
    assert BY_NAME["causal_d192_128_s8192"].head_dim_v == 128


@pytest.mark.parametrize("name", SORTS)
@pytest.mark.parametrize("seqlen", [1, 33, 96])
def test_work_is_counted_as_pair_by_pair(name: str, seqlen: int) -> None:
    case = dataclasses.replace(BY_NAME[name].small, batch=3, seqlen=seqlen)
    allowed = pairs_allowed(problem_of(case, training=False))
    assert case.pairs == int(allowed.sum())
    assert torch.equal(kernel_cases.used_queries(case)[:, 0, :, 0], allowed.any(-1)[:, 0])
    products = 2 * case.pairs * case.heads_q * (case.head_dim + case.head_dim_v)
    assert [case.flops(which) for which in PASSES] == [products, 2.5 * products, 3.5 * products]


def test_work_of_known_cases() -> None:
    # 2 rows of 16 heads, 8192 queries, half of the square and its diagonal.
    assert BY_NAME["causal_d128_s8192"].flops("forward") == 4 * 2 * 16 * 128 * 8192 * 8193 / 2
    assert BY_NAME["window"].pairs == 2 * (8192 * 1024 - 1024 * 1023 // 2)
    assert BY_NAME["documents"].pairs == 2 * 8 * 1024 * 1024
    lengths = [2048 * (14 - row) // 14 + (2048 * row % 14 > 0) for row in range(8)]
    assert lengths[0] == 2048
    assert lengths[-1] == 1024
    assert BY_NAME["padding_left"].pairs == sum(n * (n + 1) // 2 for n in lengths)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("training", [False, True])
def test_the_spec_of_a_full_case_is_taken_and_becomes_the_parts_that_it_should(case: Case, training: bool) -> None:
    spec = select_cases.spec_of(case, training=training)
    assert TritonAttention().why_not(spec, Target.fake()) == []
    assert tile_table.tiles(spec, Target.fake())
    plan = parts.make_plan(spec)
    assert (plan.keys, plan.documents) == (case.padding is not None, case.documents is not None)
    assert (plan.bias, plan.slopes, plan.distances, plan.sinks) == (case.bias, case.alibi, case.table, case.sinks)
    assert (plan.bias_grad, plan.distances_grad, plan.sinks_grad) == tuple(
        training and wanted for wanted in (case.bias, case.table, case.sinks)
    )
    assert not plan.mask
    assert not plan.rows
    assert plan.tiles == (plan.keys or plan.documents)
    left = None if case.window is None else case.window - 1
    assert plan.band == (Band(left=left, right=0) if case.causal else None)


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("name", SORTS)
def test_ours_computes_the_case(name: str, listed: None) -> None:
    problem = problem_of(BY_NAME[name].small)
    found, expected = outcome(kernel_peers.ours(problem), problem), outcome(attention(problem), problem)
    assert bool(problem.plan.tiles) == ("tiles" in problem.named) == name.startswith(("padding", "documents"))
    assert [x.shape for x in found[:4]] == [x.shape for x in expected[:4]]
    for mine, right in zip(found[:4], expected, strict=False):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)
    if name.startswith("t5"):
        # Ours is by distance for each head, in the first of its copies; the table is by distance.
        count = 2 * problem.case.seqlen - 1
        torch.testing.assert_close(found[4][:, 0, :count].T, expected[4], rtol=1e-4, atol=1e-4)
    elif len(expected) > 4:
        torch.testing.assert_close(found[4], expected[4], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in SORTS if name not in ("softcap", "sinks")])
def test_the_dense_bias_of_peers_says_the_same(name: str) -> None:
    problem = problem_of(BY_NAME[name].small)
    found = outcome(kernel_peers.sdpa(problem, SDPBackend.MATH), problem)
    expected = outcome(attention(problem), problem)
    for theirs, right in zip(found[:4], expected, strict=False):
        torch.testing.assert_close(theirs, right, rtol=1e-4, atol=1e-4)
    # What is learned has a gradient; slopes and masks have none.
    assert len(found) == 4 + name.startswith(("bias", "t5"))


@pytest.mark.in_turns(4)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", SORTS)
def test_flex_computes_the_same(name: str) -> None:
    problem = problem_of(BY_NAME[name].small, training=False)
    found = outcome(kernel_peers.flex(problem, compiled=False), problem)
    torch.testing.assert_close(found, outcome(attention(problem), problem), rtol=1e-4, atol=1e-4)


def refusing(problem: Problem) -> Side:
    def call() -> Tensor:
        raise RuntimeError("No available kernel. Aborting execution.")

    return Side(call=call, leaves=[])


@pytest.fixture
def case() -> Case:
    sizes = {"heads_q": 1, "heads_kv": 1, "seqlen": 32, "head_dim": 16, "head_dim_v": 16}
    return dataclasses.replace(BY_NAME["padding_left"].small, peers=("flex", "cudnn"), **sizes)


@pytest.mark.parametrize("which", PASSES)
def test_rows_of_a_case(case: Case, which: kernel_cases.Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kernels, "PEERS", {"flex": attention, "cudnn": refusing, "efficient": attention})
    given = Namespace(device="cpu", size="full", seconds=0.0, ours=["triton"], peers=["flex", "cudnn", "efficient"])
    rows = bench_kernels.measure(Asked(case, which), given)
    assert [row["side"] for row in rows] == [BACKEND, "flex", "cudnn"]
    mine, other, refused = rows
    assert float(mine["p20_us"]) <= float(mine["p50_us"]) <= float(mine["p80_us"])
    assert float(mine["tflops"]) == pytest.approx(case.flops(which) / float(mine["p50_us"]) / 1e6, abs=0.06)
    assert mine["tiles"]
    assert "ratio" not in mine
    assert float(other["ratio"]) > 0
    assert float(other["error"]) < 1e-4
    assert refused["failure"] == "RuntimeError: No available kernel. Aborting execution."
    assert "p50_us" not in refused
    assert set().union(*rows) <= set(bench_kernels.COLUMNS)
    bench_kernels.print_table(rows)


def test_error_is_relative_and_a_number_that_is_none_is_the_worst() -> None:
    mine, other = torch.tensor([1.0, 2.0, 4.5]), torch.tensor([1.0, 2.0, 5.0])
    assert kernel_timing.error([mine], [other]) == pytest.approx(0.1)
    assert kernel_timing.error([mine, mine], [mine, other[:2]]) == 0.0
    assert kernel_timing.error([torch.full((2,), torch.nan)], [torch.ones(2)]) == float("inf")
    out = torch.zeros(1, 1, 2, 1)
    used = torch.tensor([True, False])[None, None, :, None]
    assert kernel_timing.error([out + 1.0], [torch.tensor([1.0, torch.nan]).reshape(1, 1, 2, 1)], used) == 0.0


def test_a_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kernels.csv"
    arguments = "--device cpu --size small --seconds 0 --peers --passes forward --cases causal_d64_s2048 --commit abc"
    command = ["--output", str(path), *arguments.split()]
    assert bench_kernels.main(command) == bench_kernels.main([*command, "--append"]) == 0
    (row,) = harness.read(path)
    assert (row["case"], row["side"], row["commit"], row["dtype"]) == ("causal_d64_s2048", BACKEND, "abc", "float32")
    assert row["triton"] == Target.current("cpu").triton
    assert "causal_d64_s2048" in capsys.readouterr().out


@pytest.mark.in_turns(3)
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", ["padding_right", "documents_causal", "window", "causal_d64_s8192"])
@pytest.mark.parametrize("peer", kernel_peers.LIBRARIES)
@pytest.mark.parametrize("which", PASSES)
def test_other_libraries_compute_the_same(name: str, peer: str, which: kernel_cases.Pass) -> None:
    """Packed rows, too, whose padding has no say."""
    problem = problem_of(BY_NAME[name].small)
    makes = {"ours": attention, peer: kernel_peers.PEERS[peer]}
    rows: dict[str, dict[str, str]] = {side: {} for side in makes}
    packed = {"packed": peer == "fa4"}
    _, outcome = kernel_timing.prepared(problem, which, makes, rows, **packed)
    kernel_timing.compared(rows, outcome, "ours", kernel_timing.used_by(problem, which, **packed))
    assert rows["ours"] == {}
    assert float(rows[peer]["error"]) < 1e-4
