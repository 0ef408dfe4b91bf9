"""One run of the model's own graph on the real inputs, which makes each check as soon as its values are there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.reporting.verifications import Verification
from attn_compiler.verifying import whole
from attn_compiler.verifying.comparing import Compared, raise_first
from attn_compiler.verifying.plan import CheckPlan
from attn_compiler.verifying.values import Check, Key, NoValueError, Values
from attn_compiler.verifying.whole import Called, Ran

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
        self._waiting = [(check, set(check.needs)) for check in plan.checks if check.skipped is None]
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
        if keys:
            self._waiting, waiting = [], [(check, missing - keys) for check, missing in self._waiting]
            for check, missing in waiting:
                if missing:
                    self._waiting.append((check, missing))
                else:
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

    def _say(self, check: Check, compared: Compared | None = None, *, skipped: str | None = None) -> None:
        words = {"graph": self._plan.graph, "module": check.site.module, "subject": check.subject}
        found = compared or Compared(elements=0)
        self._found[check] = found.said(**words, formula=check.formula, skipped=skipped)

    def finish(self) -> list[Verification]:
        """Return every check's result, in order. Raises the first mismatch, with the others in a note, on all ranks."""
        if self._plan.ranks is not None:
            self._plan.ranks.raise_first(self._mismatches)
        raise_first([mismatch for _, mismatch in self._mismatches])
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
