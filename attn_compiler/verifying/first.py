"""The first call of a graph, and the first with a backward: one run of the model's own graph on the real inputs, and what is compared.

Each check is made as soon as its values are there.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from attn_compiler.reasons.errors import AttnCompilerWarning, CompileFailed, VerificationMismatch, described
from attn_compiler.reporting import verifications as results
from attn_compiler.reporting.verifications import Verification
from attn_compiler.torch_private import compat as torch_compat
from attn_compiler.verifying import comparing, watching, whole
from attn_compiler.verifying.comparing import Compared
from attn_compiler.verifying.plan import CheckPlan
from attn_compiler.verifying.values import Check, Key, NoValueError, Values
from attn_compiler.verifying.watching import Arrived, CannotWatchError
from attn_compiler.verifying.whole import SUBJECT_GRADIENTS, Called, Fingerprint, Ran, fingerprint

_NONE = Compared(elements=0)
#: calls without the expected backward, after which none is expected any more
CALLS_WITHOUT_BACKWARD = 8
_OF_PART = "no rank can run the model's own graph on the whole sequence"
#: Sites are compared, and each mismatch is one on all ranks. Later findings are not exchanged.
_OF_CACHE = "ranks share a cache of keys, and an error of one rank alone would leave the others waiting"


@dataclass(frozen=True, kw_only=True)
class Run:
    """Results of one run. called: the inputs as they were. ran: results of the model's own graph. found: every check's result, in the order
    of the plan. apart: why the whole graph may rightly differ, if it may."""

    called: Called
    ran: Ran
    found: list[Verification]
    apart: str | None


def run_checks(plan: CheckPlan, args: Sequence[Any]) -> Run:
    """Run the model's own graph and check. Raises VerificationMismatch for the first wrong site. args: as the compiled function gets them;
    neither they nor the state of random number generators change."""
    called = Called.copied(plan, args)
    session = _Session(plan)
    try:
        ran = whole.run_model(called, record=session.record)
        found = session.finish()
        return Run(called=called, ran=ran, found=found, apart=session.apart or called.apart(ran))
    except VerificationMismatch:
        raise
    except Exception as error:
        if plan.ranks is not None:
            plan.ranks.failed(error)
        raise
    finally:
        session.close()


class _Session:
    """State of one run: values of waiting checks, and results of finished ones."""

    def __init__(self, plan: CheckPlan) -> None:
        self._plan = plan
        self._values = Values(bodies=plan.mirrors)
        self._waiting = [check for check in plan.checks if check.skipped is None]
        self._seen: set[Key] = set()
        self._wanted: Counter[Key] = Counter(key for check in plan.checks for key in check.needs)
        self._moments: dict[tuple[int, str], list[Key]] = {}
        for key in self._wanted:
            self._moments.setdefault((key.body, key.after or key.name), []).append(key)
        self._held: dict[tuple[int, str], Any] = dict.fromkeys((k.body, k.name) for k in self._wanted if k.after)
        self._found: dict[Check, Verification] = {}
        self._mismatches: list[tuple[int, VerificationMismatch]] = []
        self._instead: dict[tuple[int, str], torch.Tensor] = {}
        self._left_out: list[str] = []
        self._not_run: set[Check] = set()

    @property
    def apart(self) -> str | None:
        """Why values after the sites may differ from the model's, if they may."""
        if self._plan.ranks is not None:
            return _OF_CACHE if self._plan.ranks.has_whole else _OF_PART
        outs = [check for check in self._plan.outputs() if check not in self._not_run]
        if self._plan.padded is None and not self._plan.has_linear and all(check.is_as_it_was for check in outs):
            return "every attention is as the model made it"
        if self._left_out:
            return f"{self._left_out[0]} gives something else for rows without any key"
        unknown = [check for check in outs if self._found[check].skipped is not None and not check.is_as_it_was]
        return f"{unknown[0].site.module}: {self._found[unknown[0]].skipped}" if unknown else None

    def record(self, node: fx.Node, value: Any) -> Any:
        """Note a node's value, then make the checks that waited for it. Return the value to continue with."""
        for symbol, dim in self._plan.symbols.get((node.graph, node.name), ()):
            self._values.symbols.setdefault(symbol, int(value if dim is None else value.shape[dim]))
        body = self._plan.bodies.get(node.graph)
        if body is None:
            return value
        now = (body.index, node.name)
        if now in self._held:
            self._held[now] = value
        keys = {key for key in self._moments.get(now, ()) if self._wanted[key]}
        for key in keys:
            found = value if key.after is None else self._held[key.body, key.name]
            self._values.recorded[key] = found.clone() if key.copied and isinstance(found, torch.Tensor) else found
        self._seen |= keys
        for check in [check for check in self._waiting if keys and check.needs <= self._seen]:
            self._waiting.remove(check)
            self._make(check)
        return self._instead.pop(now, value)

    def _make(self, check: Check) -> None:
        try:
            compared = check.compare(self._values)
        except NoValueError as error:
            self._say(check, skipped=str(error))
        except VerificationMismatch as mismatch:
            self._mismatches.append((self._plan.checks.index(check), mismatch))
        else:
            if compared.left_out:
                self._left_out.append(check.site.module)
            name = check.body.names.get(check.site.match.out)
            if compared.instead is not None and name is not None:
                self._instead[check.body.index, name] = compared.instead
            self._say(check, compared)
        for key in check.needs:
            self._wanted[key] -= 1
            if not self._wanted[key]:
                del self._values.recorded[key]

    def _say(self, check: Check, compared: Compared = _NONE, *, skipped: str | None = None) -> None:
        words = {"graph": self._plan.graph, "module": check.site.module, "subject": check.subject}
        self._found[check] = compared.said(**words, formula=check.formula, skipped=skipped)

    def finish(self) -> list[Verification]:
        """Return every check's result, in order. Raises the first mismatch, with the others in a note, on all ranks."""
        if self._plan.ranks is not None:
            self._plan.ranks.raise_first(self._mismatches)
        comparing.raise_first([mismatch for _, mismatch in self._mismatches])
        for check in self._plan.checks:
            if check.skipped is not None:
                self._say(check, skipped=check.skipped)
            elif check not in self._found:
                self._not_run.add(check)
                self._say(check, skipped="the first call did not run the graph that it is in")
        return [self._found[check] for check in self._plan.checks]

    def close(self) -> None:
        """Release all values."""
        self._values.recorded.clear()
        self._held.clear()


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

    @property
    def _is_watching(self) -> bool:
        return self._watched is not None and self._watched() is not None

    def call(self, compiled: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Call the compiled function. Raises VerificationMismatch."""
        with self._lock:
            plan, run = self._plan, None
            if plan is not None and self._forward:
                with _unhindered(plan, "the check of the first call"):
                    run = run_checks(plan, args)
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
                    results.keep([whole.check_outputs(run.called, run.ran, outs, args, run.apart)])
            except VerificationMismatch:
                self._forward = True
                raise
        if backward is not None:
            with _unhindered(plan, "watching the backward"):
                outs = self._watch(plan, backward, outs, args)
        self._close()
        return outs

    def _armed(self, plan: CheckPlan, args: Sequence[Any], run: Run | None) -> _Backward | None:
        """Return the data to compare this call's backward, if one is expected and none is watched."""
        if not self._backward or self._is_watching:
            return None
        # No backward is expected any more, unless all goes well.
        self._backward, backward = False, None
        if plan.communicates:
            results.keep([whole.said(plan, SUBJECT_GRADIENTS, skipped="the graph communicates with other processes")])
        elif self._waits == CALLS_WITHOUT_BACKWARD:
            why = f"none of the first {self._waits} calls was followed by a backward"
            results.keep([whole.said(plan, SUBJECT_GRADIENTS, skipped=why)])
        elif torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
            with _unhindered(plan, "preparing the check of the gradients"):
                called = run.called if run is not None else Called.copied(plan, args)
                backward = _Backward(first=self, called=called, edges=watching.edges(args))
                self._backward = True
        return backward

    def _watch(self, plan: CheckPlan, backward: _Backward, outs: Any, args: Sequence[Any]) -> Any:
        edges, backward.edges = backward.edges, {}
        if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in outs):
            self._backward = False
            return outs
        try:
            found = watching.watch(outs, args, edges, backward.done)
        except CannotWatchError as error:
            self._backward = False
            results.keep([whole.said(plan, SUBJECT_GRADIENTS, skipped=str(error))])
            return outs
        backward.remember([*found, *args])
        self._watched = weakref.ref(backward)
        self._waits += 1
        return type(outs)(found)

    def _close(self) -> None:
        """Release the plan once nothing is left to wait for."""
        if not self._forward and not self._backward and not self._is_watching:
            self._plan = None

    def compare_gradients(self, called: Called, arrived: Arrived, apart: str | None) -> None:
        """Finish the first backward. Raises VerificationMismatch; the next call's backward is then checked again."""
        self._watched = None
        with _unhindered(called.plan, "the check of the gradients"):
            results.keep([whole.check_gradients(called, arrived, self._apart or apart)])
        self._backward = False
        self._close()


class _Backward:
    """The data to compare one call's backward with. Its hooks hold it, and release it with the backward."""

    def __init__(self, *, first: First, called: Called, edges: dict[int, watching.Edge]) -> None:
        self.edges = edges
        self._first, self._called = first, called
        self._results: dict[int, tuple[torch.Tensor, Fingerprint, int | None]] = {}
        self._is_done = False

    def remember(self, found: Sequence[Any]) -> None:
        """Note the memory and contents of the call's results, to detect writes by the caller; of views their number, too."""
        for place, x in enumerate(found):
            if comparing.is_plain(x):
                counted = torch_compat.writes_counted(x) if x.requires_grad and torch_compat.is_view(x) else None
                self._results[place] = x.detach(), fingerprint(x), counted

    def done(self, arrived: Arrived) -> None:
        if self._is_done:
            return
        self._is_done, apart, written = True, None, {}
        for place, (alias, held, counted) in self._results.items():
            # Autograd moves a view that is written to another node of its graph: hooks on the old one do not run.
            if counted is not None and torch_compat.writes_counted(alias) != counted:
                apart = "the caller wrote to an output in place that is a view"
            if fingerprint(alias) != held:
                written[place] = alias
        called, self._results = self._called, {}
        del self._called
        self._first.compare_gradients(called, replace(arrived, written=written), apart)


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
