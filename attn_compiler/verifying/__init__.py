"""`options={"verify": True}`: on the first call of a compiled graph, what was made of it is held against the model's own graph.

The model's own graph runs once more, op by op, on copies of the real inputs. At each site the recovered mask is evaluated at
every (b, h, q, k) against the tensors that the model masks with (masks.py), what was proved to be added against those that it
adds (scores.py), and what the rewritten graph computes there against the model's output (outputs.py); all from the model's own
values, so that one wrong site is one mismatch. The first mismatch raises VerificationMismatch before the compiled function
runs. Later calls run the compiled function alone.

plan.py: what to check, made ready before the graph is given away. running.py: the run. pairs.py: the model's tensors, query by
key. rounding.py: how far a bias may be off. values.py: values of nodes. copies.py: of graphs and inputs. results.py: what was
found. The run holds a copy of the inputs (of trained parameters only where the graph may write to them) and, for one site at a
time, its attention in a wider dtype.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch._subclasses import FakeTensor

from attn_compiler.errors import AttnCompilerWarning, CompileFailed, VerificationMismatch, described
from attn_compiler.verifying import results, running
from attn_compiler.verifying.plan import Plan, prepare
from attn_compiler.verifying.results import Verification, verifications

__all__ = ["Plan", "Verification", "checked", "prepare", "verifications"]


def checked(compiled: Callable[..., Any], plan: Plan | None, *, strict: bool = False) -> Callable[..., Any]:
    """The compiled function, which verifies on its first call. plan: from `prepare`; with None there is nothing to check.

    A call on fake tensors, by which PyTorch learns shapes, is not the first call. One that raises VerificationMismatch does not
    count either: the next call verifies again. A check that itself fails (out of memory ...) is one warning, and is not tried again;
    with `strict` it raises.
    """
    if plan is None:
        return compiled
    first = _First(plan, strict)

    def call(*args: Any) -> Any:
        if first.plan is not None and not any(isinstance(x, FakeTensor) for x in args):
            first.verify(args)
        return compiled(*args)

    return call


class _First:
    """The first call: several threads may make it at once, and one of them verifies. plan: None once it is done."""

    def __init__(self, plan: Plan, strict: bool) -> None:
        self.plan: Plan | None = plan
        self._strict = strict
        self._lock = threading.Lock()

    def verify(self, args: Sequence[Any]) -> None:
        with self._lock:
            if self.plan is not None:
                self._run(self.plan, args)
                self.plan = None

    def _run(self, plan: Plan, args: Sequence[Any]) -> None:
        try:
            results.keep(running.run(plan, args))
        except VerificationMismatch:
            raise
        except Exception as error:
            said = CompileFailed(
                step="run the check of options={'verify': True}",
                graph=plan.graph,
                cause=described(error),
                instead="the graph runs unchecked",
            )
            if self._strict:
                raise said from error
            warnings.warn(str(said), AttnCompilerWarning, stacklevel=4)
