"""AC8xx: something of ours failed, and the model is as it was there."""

from __future__ import annotations

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.pages.page import ExampleKind, Page

_REPORT = (
    "Please report it: compile with `options={'strict': True, 'dump_dir': 'attn_dumps'}` and send the dump. "
    "`options={'lowering': 'untouched'}` leaves every attention as the model made it."
)

PAGES = (
    Page(
        code=Code.FAULT,
        title="A pass failed at this attention",
        cause="An exception of ours was caught. It cost this attention alone: that part of the graph is as the model "
        "made it, and its numbers are right.",
        remedy=_REPORT,
        kind=ExampleKind.TOLD,
        example="It takes a fault of this package. tests/passes/graph/test_faults.py makes one in each pass.",
    ),
    Page(
        code=Code.COMPILER_REFUSED,
        title="The compiler did not take the graph with this kernel in it",
        cause="Inductor, or another inner compiler, failed on the graph that the passes had made. The model's own graph "
        "was compiled instead.",
        remedy=_REPORT,
        kind=ExampleKind.TOLD,
        example="It takes a fault of the inner compiler. tests/test_always_runs.py has a compiler that fails.",
    ),
)
