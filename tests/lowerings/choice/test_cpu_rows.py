"""The CPU's rows of the choice."""

from __future__ import annotations

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.choice import priorities
from attn_compiler.spec.target import Target
from tests.lowerings.specs import make_spec


def test_every_row_is_the_cpus_and_has_its_evidence() -> None:
    for row in priorities.group("cpu"):
        assert row.sms is None
        assert row.why
        assert row.since.startswith("2026-11-")
        for name in row.order:
            assert by_name(name)


def test_they_decide_for_a_cpu_and_no_other_rows_do() -> None:
    for dtype in ("float32", "bfloat16"):
        spec = make_spec(device="cpu", dtype=dtype)
        row = priorities.row_of(spec, Target.fake(device="cpu"))
        assert row in priorities.group("cpu")
        assert priorities.row_of(spec, Target.fake()) not in priorities.group("cpu")
