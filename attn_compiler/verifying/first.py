"""The first call of a graph, and the first with a backward: comparison of their results with the model's own graph."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_compiler.reasons.errors import AttnCompilerWarning, CompileFailed, VerificationMismatch, described
from attn_compiler.reporting import verifications as results
from attn_compiler.torch_private import compat as torch_compat
from attn_compiler.verifying import comparing, running, watching, whole
from attn_compiler.verifying.plan import CheckPlan
from attn_compiler.verifying.running import Run
from attn_compiler.verifying.watching import Arrived, CannotWatchError
from attn_compiler.verifying.whole import SUBJECT_GRADIENTS, SUBJECT_OUTPUTS, Called, Fingerprint, fingerprint

#: calls without the expected backward, after which none is expected any more
CALLS_WITHOUT_BACKWARD = 8


class First:
    """The remaining checks of one graph. Several threads may make the first call at once, and one of them verifies."""

    def __init__(self, plan: CheckPlan) -> None:
        self._plan: CheckPlan | None = plan
        self._lock = threading.Lock()
        self._forward = self._backward = True
        self._apart: str | None = None
        self._watched: weakref.ref[_Backward] | None = None
        self._waits = 0

    @property
    def is_over(self) -> bool:
        """True if everything was compared."""
        return self._plan is None

    def call(self, compiled: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Call the compiled function. Raises VerificationMismatch."""
        with self._lock:
            plan, run = self._plan, None
            if plan is not None and self._forward:
                with _unhindered(plan, "the check of the first call"):
                    run = running.run_checks(plan, args)
                    results.keep(run.found)
                    self._apart = run.apart
                # A check that failed itself would fail again.
                self._forward, self._backward = False, self._backward and run is not None
            backward = self._armed(plan, args, run) if plan is not None else None
        outs = compiled(*args)
        plan = self._plan
        if plan is None or not isinstance(outs, tuple | list):
            return outs
        if run is not None:
            try:
                with _unhindered(plan, "the check of what the graph gives"):
                    skipped = whole.said(plan, SUBJECT_OUTPUTS, skipped=run.apart)
                    compared = run.apart is None
                    results.keep([whole.check_outputs(run.called, run.ran, outs, args) if compared else skipped])
            except VerificationMismatch:
                self._forward = True
                raise
        if backward is not None:
            outs = self._watch(plan, backward, outs, args)
        self._close()
        return outs

    def _armed(self, plan: CheckPlan, args: Sequence[Any], run: Run | None) -> _Backward | None:
        """Return the data to compare this call's backward, if one is expected and none is watched."""
        if not self._backward or self._is_watching:
            return None
        backward, why = None, None
        if plan.communicates:
            why = "the graph communicates with other processes"
        elif self._waits == CALLS_WITHOUT_BACKWARD:
            why = f"none of the first {self._waits} calls was followed by a backward"
        wanted = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
        if why is not None or not wanted:
            self._give_up(plan, why)
            return None
        with _unhindered(plan, "preparing the check of the gradients"):
            called = run.called if run is not None else Called.copied(plan, args)
            backward = _Backward(first=self, called=called, edges=watching.edges(args))
        self._backward = backward is not None
        return backward

    def _give_up(self, plan: CheckPlan, why: str | None) -> None:
        """Expect no backward any more. why: the reason that nothing was compared, for people."""
        self._backward = False
        if why is not None:
            results.keep([whole.said(plan, SUBJECT_GRADIENTS, skipped=why)])

    @property
    def _is_watching(self) -> bool:
        return self._watched is not None and self._watched() is not None

    def _watch(self, plan: CheckPlan, backward: _Backward, outs: Any, args: Sequence[Any]) -> Any:
        edges, backward.edges = backward.edges, {}
        if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in outs):
            self._give_up(plan, None)
            return outs
        found = outs
        with _unhindered(plan, "watching the backward"):
            try:
                found = type(outs)(watching.watch(outs, args, edges, backward.done))
            except CannotWatchError as error:
                self._give_up(plan, str(error))
                return outs
            backward.remember([*found, *args])
            self._watched = weakref.ref(backward)
            self._waits += 1
        return found

    def _close(self) -> None:
        """Release the plan once nothing is left to wait for."""
        if not self._forward and not self._backward and not self._is_watching:
            self._plan = None

    def compare_gradients(self, called: Called, arrived: Arrived, held: dict[int, _Held]) -> None:
        """Finish the first backward. Raises VerificationMismatch; the next call's backward is then checked again."""
        self._watched, apart = None, self._apart
        if apart is None and any(x.is_moved for x in held.values()):
            apart = "the caller wrote to an output in place that is a view"
        with _unhindered(called.plan, "the check of the gradients"):
            written = {place: x.alias for place, x in held.items() if fingerprint(x.alias) != x.held}
            results.keep([whole.check_gradients(called, arrived, written, apart)])
        self._backward = False
        self._close()


class _Backward:
    """The data to compare one call's backward with. Its hooks hold it, and release it with the backward."""

    def __init__(self, *, first: First, called: Called, edges: dict[int, watching.Edge]) -> None:
        self.edges = edges
        self._first = first
        self._called: Called | None = called
        self._results: dict[int, _Held] = {}

    def remember(self, found: Sequence[Any]) -> None:
        """Note the contents of the call's results, to detect writes by the caller."""
        self._results = {place: _Held.take(x) for place, x in enumerate(found) if comparing.is_plain(x)}

    def done(self, arrived: Arrived) -> None:
        called, self._called = self._called, None
        held, self._results = self._results, {}
        if called is not None:
            self._first.compare_gradients(called, arrived, held)


@dataclass(frozen=True, kw_only=True)
class _Held:
    """The contents of a tensor at one time. alias: its memory, outside of autograd's graph."""

    alias: torch.Tensor
    held: Fingerprint
    writes: int
    is_view: bool

    @staticmethod
    def take(x: torch.Tensor) -> _Held:
        is_view, writes = x.requires_grad and torch_compat.is_view(x), torch_compat.writes_counted(x)
        return _Held(alias=x.detach(), held=fingerprint(x), writes=writes, is_view=is_view)

    @property
    def is_moved(self) -> bool:
        """True if it is a view that autograd moved to another node of its graph: hooks on the old one do not run."""
        return self.is_view and torch_compat.writes_counted(self.alias) != self.writes


@contextlib.contextmanager
def _unhindered(plan: CheckPlan, what: str) -> Iterator[None]:
    """Turn a failure of a check into a warning: it is no fault of the model, which runs on. With strict=True it raises."""
    try:
        yield
    except VerificationMismatch:
        raise
    except Exception as error:
        # The user's model runs on if a check breaks.
        said = CompileFailed(
            step=f"run {what} of options={{'verify': True}}",
            graph=plan.graph,
            cause=described(error),
            instead="the graph runs, and this is not verified",
        )
        if plan.strict:
            raise said from error
        warnings.warn(str(said), AttnCompilerWarning, stacklevel=2)
