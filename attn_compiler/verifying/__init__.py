"""`options={"verify": True}`: on the first call of a compiled graph, compare the rewritten attention with the model's own graph.

The model's own graph runs once more, op by op, on copies of the real inputs. At each site three checks compare at every (b, h, q, k) the
recovered mask and the proved biases with the model's tensors (pairs.py), and the rewritten graph's result with the model's output
(outputs.py). All use the model's own values, so that one wrong site is one mismatch. The first raises before the compiled function runs.
Then its outputs and its writes to inputs are compared, and the first backward (first.py, whole.py, watching.py).

plan.py: the checks, prepared before the graph is given away. values.py: values of nodes, and the needed ones.
interpreting.py: a graph in several arithmetics, and copies. ranks.py: attention over a sequence that ranks share. comparing.py: the rule.
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
    """Return the compiled function, which verifies on its first call. plan: from `plan.prepare`; None: nothing to check.

    A call on fake tensors, by which PyTorch infers shapes, is not the first call. One that raises VerificationMismatch does not count
    either: the next call verifies again. A check that itself fails (out of memory ...) is one warning, and is not tried again; with
    `strict` it raises.
    """
    if plan is None:
        return compiled
    # Imported late: most processes never verify.
    from attn_compiler.verifying.first import First

    first = First(plan)

    def call(*args: Any) -> Any:
        if first.is_over or any(isinstance(x, FakeTensor) for x in args):
            return compiled(*args)
        return first.call(compiled, args)

    return call
