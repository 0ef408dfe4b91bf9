"""Comparison of the first backward with that of the model's own graph.

From the gradients at the compiled graph's outputs the model's own graph computes the gradients of its inputs, on copies of the inputs as
they were at the call. Each site's gradients are compared at the site (site_gradients.py), then those of the inputs. The latter also detect
a tensor that the backward read after somebody had written to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph import mutation
from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.reporting.verifications import Verification
from attn_compiler.verifying import comparing, site_gradients, whole
from attn_compiler.verifying.checks import Check
from attn_compiler.verifying.comparing import Compared
from attn_compiler.verifying.copies import leaving_no_trace
from attn_compiler.verifying.interpreting import Autocast
from attn_compiler.verifying.numbers import Noise
from attn_compiler.verifying.plan import CheckPlan
from attn_compiler.verifying.running import Session
from attn_compiler.verifying.site_gradients import Given
from attn_compiler.verifying.values import Body, Key, NoValueError
from attn_compiler.verifying.watching import Arrived
from attn_compiler.verifying.whole import Called, Ran, SeenBackward

SUBJECT_WHOLE = "graph gradients"


def check_gradients(
    called: Called, arrived: Arrived, written: Mapping[int, torch.Tensor], apart: str | None
) -> list[Verification]:
    """Compare the gradients of one backward. Raises VerificationMismatch.

    written: results of the call that the caller has written to since, by place, with their current contents. apart: why the whole graph's
    gradients may rightly differ, if they may.
    """
    plan = called.plan
    if called.changed:
        names = ", ".join(plan.inputs[i] for i in called.changed)
        return [skipped(plan, f"written to between forward and backward: {names}")]
    came = arrived.outputs if plan.padded is None else plan.padded.cleared(arrived.outputs, called.args)
    backward = SeenBackward(arrived=came, written=written)
    session = _GradientSession(plan)
    try:
        ran = whole.run_model(called, backward=backward, record=session.record)
        with leaving_no_trace(called.args, plan.devices, gradients=True):
            session.compare()
        return [*session.finish(), _check_whole(called, arrived, backward, ran, apart)]
    finally:
        session.close()


def _check_whole(called: Called, arrived: Arrived, backward: SeenBackward, ran: Ran, apart: str | None) -> Verification:
    plan = called.plan
    if apart is not None:
        return skipped(plan, apart)
    wanted = list(arrived.inputs)

    def run(noise: Noise | None) -> list[torch.Tensor | None]:
        made = whole.rerun(called, noise, backward)
        return [made[i] for i in wanted]

    new, own = [arrived.inputs[i] for i in wanted], [ran.gradients[i] for i in wanted]
    words = whole.words(plan, lambda: [f"gradient of {plan.inputs[i]}" for i in wanted])
    rule = whole.rule(plan, beside=list(arrived.outputs.values()))
    try:
        compared = comparing.compare(new, own, run, rule, words)
    except VerificationMismatch:
        if not whole.overwrites_saved(called, backward):
            raise
        return skipped(plan, "the model writes, through .data or detach(), to what autograd saved for the backward")
    return whole.verification(plan, SUBJECT_WHOLE, compared)


def skipped(plan: CheckPlan, why: str) -> Verification:
    """Return a skipped check of the whole graph's gradients."""
    return whole.verification(plan, SUBJECT_WHOLE, skipped=why)


class _GradientSession(Session):
    """Keep the values of each site's check until the backward has computed the gradient of its output."""

    def __init__(self, plan: CheckPlan) -> None:
        super().__init__(plan, plan.gradient_checks())
        self._given: dict[Check, Given] = {}

    def record(self, node: fx.Node, value: Any) -> Any:
        body = self._plan.bodies.get(node.graph)
        for check in self._checks if body is not None else ():
            is_out = check.skipped is None and check.body is body and body.names[check.site.match.out] == node.name
            if is_out and check not in self._given:
                self._given[check] = self._listening(value)
        return super().record(node, value)

    def _listening(self, value: Any) -> Given:
        given = Given(autocast=Autocast.current(self._plan.devices))

        def arrived(gradient: torch.Tensor | None) -> None:
            if gradient is not None:
                given.gradient = gradient.detach()

        if isinstance(value, torch.Tensor) and value.requires_grad:
            value.register_hook(arrived)  # type: ignore[no-untyped-call]
        return given

    def _guarded(self, check: Check) -> None:
        given, recorded = self._given[check], {key: self._values.recorded[key] for key in check.needs}
        given.trained = [key for key, x in recorded.items() if isinstance(x, torch.Tensor) and x.requires_grad]
        frozen = {key: _frozen(self._plan, key, value) for key, value in recorded.items()}
        given.values = dataclasses.replace(self._values, recorded=frozen, symbols=dict(self._values.symbols))

    def compare(self) -> None:
        """Run the checks, once the backward is done."""
        for check in [check for check, given in self._given.items() if given.values is not None]:
            try:
                super()._guarded(check)
            except Exception as error:
                # A failed check of one site does not stop the others.
                if self._plan.strict:
                    raise
                self._skip(check, f"the check failed itself: {type(error).__name__}: {error}")
            del self._given[check]

    def _compared(self, check: Check) -> Compared:
        if check.new_out is None:
            raise NoValueError("the site is as the model made it")
        return site_gradients.check_site_gradients(check.site, check.body, check.new_out, self._given[check])

    def close(self) -> None:
        super().close()
        self._given.clear()


def _frozen(plan: CheckPlan, key: Key, value: Any) -> Any:
    """Return a tensor's current contents, protected from later writes."""
    if not isinstance(value, torch.Tensor):
        return value
    body = next(body for body in plan.mirrors.values() if body.index == key.body)
    return value.detach().clone() if _may_be_written(body, key) else value.detach()


def _may_be_written(body: Body, key: Key) -> bool:
    node = body.named.get(key.name)
    return bool(body.written) and (node is None or bool(mutation.storages(node) & body.written))
