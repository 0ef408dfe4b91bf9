from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attn_compiler.spec.target import Target
from benchmarks import bench_mla, harness
from benchmarks.bench_mla import DRY_CASES, GPU_CASES, Problem, Stepper
from tests import numerics


def test_a_dry_run_measures_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_mla, "RESULTS", tmp_path)
    assert bench_mla.main(["--dry-run"]) == 0
    assert not list(tmp_path.iterdir())


def test_sides_compute_the_same() -> None:
    made = Stepper(DRY_CASES[0], "cpu")
    torch._dynamo.reset()
    own, exact = made.compiled(harness.BACKEND)(), made.exact()
    assert numerics.worst(own, exact) < 1e-5
    # What a step adds to the cache is beyond what it starts from.
    torch.testing.assert_close(made.compiled(harness.BACKEND)(), own)


@pytest.mark.parametrize("name", ["v2_lite_b1_4k", "v3_b16_32k_half"])
def test_the_attention_alone(name: str) -> None:
    case = next(case for case in GPU_CASES if case.name == name)
    sizes = case.sizes
    spec = bench_mla.spec_of(case, "bfloat16")
    assert spec.latent is not None
    assert (spec.num_heads_q, spec.seqlen_kv, spec.latent.kept) == (sizes.heads, case.length, 576)
    problem = Problem(case=case, spec=spec, q=torch.empty(1, dtype=torch.bfloat16), caches=[])
    assert problem.bytes_used == case.batch * case.filled * 1152
    assert problem.products == 2 * case.batch * sizes.heads * case.filled * 1088
    first, *others = bench_mla.schedules(problem, Target.fake(sm=90, processors=132))
    assert first.splits is not None
    assert first not in others
    assert len(set(others)) == len(others) > 1


def test_many_heads_are_timed_with_both_kernels() -> None:
    """As in docs/mla.md."""
    kernels = {}
    for case in bench_mla.HEADS_CASES:
        spec = bench_mla.spec_of(case, "bfloat16")
        problem = Problem(case=case, spec=spec, q=torch.empty(1, dtype=torch.bfloat16), caches=[])
        rule, *others = bench_mla.schedules(problem, Target.fake(sm=90, processors=132))
        kernels[case.name] = rule.hopper
        assert not any(other.hopper for other in others)
    assert [name for name, is_for_hopper in kernels.items() if not is_for_hopper] == ["heads16_b16_4096"]
    assert len(kernels) == 9


def test_the_kernel_is_given_the_filled_part_of_a_cache() -> None:
    case = DRY_CASES[0]
    problem = Problem.of(case, "cpu", torch.float32, together=1)
    schedule = next(bench_mla.schedules(problem, Target.fake(sm=90, processors=8)))
    found = problem.calls(schedule)[0]()
    torch.testing.assert_close(found, problem.expected(), atol=1e-5, rtol=1e-4)
