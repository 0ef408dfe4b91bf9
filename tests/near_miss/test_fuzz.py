"""Random attentions: whatever is understood of a program, compiled and eager give the same outputs, gradients and inputs.

Hypothesis draws the same programs each time (derandomize). For a longer search, more examples from other seeds:
    pytest tests/near_miss/test_fuzz.py -m slow --hypothesis-seed=1
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

import attn_compiler
from tests.near_miss import checking
from tests.near_miss.programs import Program, programs

LOWERINGS = (checking.LOWERINGS, ("reference",), ("math",))
RARELY = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
FAST = settings(max_examples=50, deadline=None, derandomize=True, database=None, suppress_health_check=RARELY)
LONG = settings(max_examples=1500, deadline=None, database=None, suppress_health_check=RARELY)


def compare(program: Program, seen: Counter[str]) -> None:
    """Compile one program. Programs that eager itself can't run, or that give infinities or NaN, are left out."""
    function = program.function()
    assume(runs(program))
    torch._dynamo.reset()
    dynamic = True if program.dynamic else None
    checking.assert_same(
        function, program.tensors, lowerings=LOWERINGS[sum(seen.values()) % len(LOWERINGS)], dynamic=dynamic
    )
    for report in attn_compiler.reports():
        seen.update(site.decision.lowering for site in report.sites for _ in site.modules)
        seen["missed"] += report.num_misses


def runs(program: Program) -> bool:
    try:
        results = checking.run(program.function(), program.tensors())
    except (RuntimeError, IndexError):
        return False
    return all(r.value is None or bool(r.value.isfinite().all()) for r in results)


def test_random_attentions() -> None:
    """Also holds that most are attentions, so that the comparison is one."""
    seen: Counter[str] = Counter()

    @FAST
    @given(programs())
    def check(program: Program) -> None:
        compare(program, seen)

    check()
    lowered = sum(seen[name] for name in ("sdpa_cpu_flash", "reference", "math"))
    assert lowered > 30, seen
    assert min(seen["missed"], *(seen[name] for name in ("sdpa_cpu_flash", "reference", "math"))) > 3, seen


@pytest.mark.slow
@LONG
@given(programs())
def test_many_random_attentions(program: Program) -> None:
    compare(program, Counter())
