"""What decoding computes by its definition, held against the oracle that its kernels are held against."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from attn_compiler.lowerings.decode import latent_launch, launch
from attn_compiler.lowerings.shared.calls.failures import FAILURES
from tests.lowerings.decode import latent_problems, problems
from tests.lowerings.decode.problems import ALL, Case, Problem, build


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    FAILURES.forget()


def _failed(problem: Problem) -> Problem:
    """Its kernel has failed before."""
    FAILURES.fail(problem.text, "RuntimeError: planted")
    return problem


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_caches(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_by_kernel", None)
    problem = _failed(build(case))
    problems.assert_within_rule(problems.results(problem), problem)


@pytest.mark.parametrize("rope", [16, 0])
def test_latents(rope: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_launch, "_by_kernel", None)
    case = Case(name="latent", batch=2, heads_q=5, heads_kv=1, seqlen_q=2, seqlen_kv=70, keys="left")
    problem = _failed(latent_problems.of_latent(case, rope=rope))
    problems.assert_within_rule(latent_problems.results(problem), problem)
