"""What steps call is imported at once."""

from __future__ import annotations

import inspect
import re

from attn_compiler.passes.pipeline import rooms, steps


def test_all_that_steps_call_is_there_and_nothing_else() -> None:
    called = set(re.findall(r"\brooms\.(\w+)", inspect.getsource(steps)))
    assert called == set(rooms.__all__)


def test_steps_import_nothing_else_late_but_types() -> None:
    late = re.findall(r"(?m)^    +from (\S+) import", inspect.getsource(steps))
    assert set(late) == {"attn_compiler.passes.pipeline", "attn_compiler.passes.context_parallel.spread"}
