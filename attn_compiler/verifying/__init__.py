"""`options={"verify": True}`: on the first call of a compiled graph, what was made of it is held against the model's own graph.

The model's own graph runs once more, op by op, on copies of the real inputs. At each site three things are compared at every (b, h, q, k).
They are the recovered mask with the tensors that the model masks with (masks.py), what was proved to be added with those that it adds
(scores.py), and what the rewritten graph computes there with the model's output (outputs.py). All are made of the model's own values, so
that one wrong site is one mismatch.

The first mismatch raises VerificationMismatch before the compiled function runs. Then what that gives, and what it leaves in its inputs, is
compared too (first.py): whatever the graph writes to later, the values in the end are the model's. The first backward is compared likewise
(watching.py, gradients.py, site_gradients.py). Later calls run the compiled function alone.

plan.py, checks.py: what to check, made ready before the graph is given away. running.py: the run. pairs.py: the model's tensors, query by
key. numbers.py: how exact a number is. values.py: values of nodes, and which are needed. copies.py: of graphs and inputs.
shared.py, ranks.py, as_read.py: attention over a sequence that ranks share.
whole.py, interpreting.py: runs of a whole graph, in several arithmetics. recomputing.py: the model's operations at one site again.
comparing.py: the rule that all results are compared by.

The run holds a copy of the inputs (of trained parameters only where the graph may write to them) and, for one site at a time, its
attention in a wider dtype. Where gradients are needed the copy is held until the first backward, or until there can be none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch._subclasses import FakeTensor

from attn_compiler.reporting.verifications import Verification, verifications

if TYPE_CHECKING:
    from attn_compiler.verifying.plan import CheckPlan

__all__ = ["Verification", "checked", "verifications"]


def checked(compiled: Callable[..., Any], plan: CheckPlan | None) -> Callable[..., Any]:
    """The compiled function, which verifies on its first call. plan: from `plan.prepare`; with None there is nothing to check.

    A call on fake tensors, by which PyTorch learns shapes, is not the first call. One that raises VerificationMismatch does not
    count either: the next call verifies again. A check that itself fails (out of memory ...) is one warning, and is not tried again;
    with `strict` it raises.
    """
    if plan is None:
        return compiled
    # Few processes verify, and all of them start.
    from attn_compiler.verifying.first import First

    first = First(plan)

    def call(*args: Any) -> Any:
        if first.is_over or any(isinstance(x, FakeTensor) for x in args):
            return compiled(*args)
        return first.call(compiled, args)

    return call
