"""One run of the model's own graph on the real inputs, in which every check is made as soon as its values are there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from attn_compiler import torch_compat
from attn_compiler.errors import VerificationMismatch
from attn_compiler.verifying import masks, outputs, scores
from attn_compiler.verifying.copies import is_trained_parameter, isolated, leaving_no_trace
from attn_compiler.verifying.plan import Check, Plan
from attn_compiler.verifying.results import Verification
from attn_compiler.verifying.values import Key, NoValueError, Values

_CHECKPOINT = "tag_activation_checkpoint"


def run(plan: Plan, args: Sequence[Any]) -> list[Verification]:
    """Run the model's own graph and check. Raises VerificationMismatch for the first site that does not hold.

    args: as the compiled function gets them; neither they nor the state of random number generators change.
    """
    shared = [is_trained_parameter(x) and not may_write for x, may_write in zip(args, plan.may_write, strict=True)]
    session = _Session(plan)
    try:
        with leaving_no_trace(args, plan.devices):
            session.interpret(plan.module, *isolated(args, shared))
        return session.finish()
    finally:
        session.close()


class _Session:
    """What one run knows: the values that checks still wait for, and what the finished ones found."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._values = Values(bodies=plan.mirrors)
        self._waiting = [(check, set(check.needs)) for check in plan.checks if check.skipped is None]
        self._wanted: Counter[Key] = Counter(key for check in plan.checks for key in check.needs)
        self._moments: dict[tuple[int, str], list[Key]] = {}
        for key in self._wanted:
            self._moments.setdefault((key.body, key.after or key.name), []).append(key)
        self._held: dict[tuple[int, str], Any] = dict.fromkeys((k.body, k.name) for k in self._wanted if k.after)
        self._found: dict[Check, Verification] = {}
        self._mismatches: list[VerificationMismatch] = []
        for body in torch_compat.graph_modules(plan.module):
            body.forward = self._runner(body)

    def _runner(self, body: fx.GraphModule) -> Callable[..., Any]:
        return lambda *args: self.interpret(body, *args)

    def interpret(self, module: fx.GraphModule, *args: Any) -> Any:
        """Run one graph; the bodies of its higher-order calls run in the same way."""
        return _Recorder(module, self).run(*args, enable_io_processing=False)

    def record(self, node: fx.Node, value: Any) -> None:
        """Take note of a node's value, then make the checks that had been waiting for it."""
        for symbol, dim in self._plan.symbols.get((node.graph, node.name), ()):
            self._values.symbols.setdefault(symbol, int(value if dim is None else value.shape[dim]))
        body = self._plan.bodies.get(node.graph)
        if body is None:
            return
        now = (body.index, node.name)
        if now in self._held:
            self._held[now] = value
        keys = {key for key in self._moments.get(now, ()) if self._wanted[key]}
        for key in keys:
            found = value if key.after is None else self._held[key.body, key.name]
            self._values.recorded[key] = found.clone() if key.copied and isinstance(found, torch.Tensor) else found
        if keys:
            self._check_what_waited_for(keys)

    def _check_what_waited_for(self, keys: set[Key]) -> None:
        for _, missing in self._waiting:
            missing -= keys
        ready = [check for check, missing in self._waiting if not missing]
        self._waiting = [(check, missing) for check, missing in self._waiting if missing]
        for check in ready:
            self._make(check)

    def _make(self, check: Check) -> None:
        try:
            self._found[check] = self._checked(check)
        except NoValueError as error:
            self._found[check] = self._skipped(check, str(error))
        except VerificationMismatch as mismatch:
            self._mismatches.append(mismatch)
        for key in check.needs:
            self._wanted[key] -= 1
            if not self._wanted[key]:
                del self._values.recorded[key]

    def _checked(self, check: Check) -> Verification:
        if check.subject == "mask":
            return self._verification(check, elements=masks.check(check.site, self._values))
        compared = self._compared(check)
        return self._verification(check, elements=compared.elements, error=compared.error, allowed=compared.allowed)

    def _compared(self, check: Check) -> outputs.Compared:
        if check.subject == "bias":
            return scores.check(check.site, self._values)
        if check.new_out is None:
            raise NoValueError("the site is as the model made it")
        return outputs.check(check.site, check.body, check.new_out, self._values)

    def _verification(self, check: Check, **found: Any) -> Verification:
        site = check.site
        formula = scores.words(site) if check.subject == "bias" else None
        if check.subject == "mask" and site.condition is not None:
            formula = masks.formula(site)
        return Verification(graph=self._plan.graph, module=site.module, subject=check.subject, formula=formula, **found)

    def _skipped(self, check: Check, why: str) -> Verification:
        return self._verification(check, skipped=why)

    def finish(self) -> list[Verification]:
        """Every check's result, in the order of the plan. Raises the first mismatch; a note on it names the others."""
        if self._mismatches:
            first, *others = self._mismatches
            for other in others:
                first.add_note(f"also: the {other.what} at {other.site}, {other.index}")
            raise first
        for check in self._plan.checks:
            if check.skipped is not None:
                self._found[check] = self._skipped(check, check.skipped)
            elif check not in self._found:
                self._found[check] = self._skipped(check, "the first call did not run the graph that it is in")
        return [self._found[check] for check in self._plan.checks]

    def close(self) -> None:
        """Let go of all values: the plan's modules hold the session."""
        self._values.recorded.clear()
        self._held.clear()


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, session: _Session) -> None:
        super().__init__(module)
        self._session = session

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self._session.record(n, value)
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(target, torch._ops.HigherOrderOperator) and target.__name__ == _CHECKPOINT:
            # Without gradients a checkpoint is its body, which PyTorch would run with an interpreter of its own.
            body, *inputs = args
            return body(*inputs)
        return super().call_function(target, args, kwargs)
