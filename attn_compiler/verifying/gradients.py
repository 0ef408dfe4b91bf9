"""The first step's backward, against that of the model's own graph.

From what arrives at the compiled graph's outputs the model's own graph computes the gradients of its inputs, on copies of the
inputs as they were at the call. Each site's are looked at where they are (site_gradients.py), then those that the compiled backward
sent to the inputs, which also tells of what the backward read and somebody had written to since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph import mutation
from attn_compiler.reporting.verifications import Verification
from attn_compiler.verifying import comparing, site_gradients, whole
from attn_compiler.verifying.comparing import Compared
from attn_compiler.verifying.copies import leaving_no_trace
from attn_compiler.verifying.interpreting import Autocast
from attn_compiler.verifying.numbers import Noise
from attn_compiler.verifying.plan import Check, CheckPlan
from attn_compiler.verifying.running import Session
from attn_compiler.verifying.values import Body, Key, NoValueError, Values
from attn_compiler.verifying.watching import Arrived
from attn_compiler.verifying.whole import Called, Ran, SeenBackward

SUBJECT_WHOLE = "graph gradients"


def check_gradients(
    called: Called, arrived: Arrived, written: Mapping[int, torch.Tensor], apart: str | None
) -> list[Verification]:
    """Compare the gradients of one backward. Raises VerificationMismatch.

    written: results of the call that the caller has written to since, by place, with what they hold now. apart: why those of the whole
    graph may rightly be others, if they may.
    """
    plan = called.plan
    if called.changed:
        names = ", ".join(plan.inputs[i] for i in called.changed)
        return [skipped(plan, f"written to between forward and backward: {names}")]
    came = arrived.outputs if plan.padded is None else plan.padded.cleared(arrived.outputs, called.args)
    backward = SeenBackward(arrived=came, written=written)
    session = _GradientSession(plan, plan.gradient_checks())
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
        made = whole.again(called, noise, backward)
        return [made[i] for i in wanted]

    new, own = [arrived.inputs[i] for i in wanted], [ran.gradients[i] for i in wanted]
    outcome = comparing.compare(new, own, run, whole.rule(plan, beside=list(arrived.outputs.values())))
    if outcome.differences and whole.overwrites_saved(called, backward):
        return skipped(plan, "the model writes, through .data or detach(), to what autograd saved for the backward")
    compared = whole.required(plan, outcome, lambda: [f"gradient of {plan.inputs[i]}" for i in wanted])
    return whole.verification(plan, SUBJECT_WHOLE, compared)


def skipped(plan: CheckPlan, why: str) -> Verification:
    """Of the whole graph's gradients."""
    return whole.verification(plan, SUBJECT_WHOLE, skipped=why)


class _GradientSession(Session):
    """Keeps what each site's check needs until the backward has brought the gradient of its output."""

    def __init__(self, plan: CheckPlan, checks: Sequence[Check]) -> None:
        super().__init__(plan, checks)
        self._values_of: dict[Check, tuple[Values, list[Key]]] = {}
        self._gradients: dict[Check, torch.Tensor] = {}
        self._autocasts: dict[Check, Autocast] = {}
        self._outs: dict[tuple[int, str], list[Check]] = {}
        for each in checks:
            if each.skipped is None:
                name = each.body.names[each.site.match.out]
                self._outs.setdefault((each.body.index, name), []).append(each)

    def record(self, node: fx.Node, value: Any) -> Any:
        body = self._plan.bodies.get(node.graph)
        for each in self._outs.pop((body.index, node.name), ()) if body is not None else ():
            self._listen(each, value)
        return super().record(node, value)

    def _listen(self, check: Check, value: Any) -> None:
        self._autocasts[check] = Autocast.now(self._plan.devices)

        def arrived(gradient: torch.Tensor | None) -> None:
            if gradient is not None:
                self._gradients[check] = gradient.detach()

        if isinstance(value, torch.Tensor) and value.requires_grad:
            value.register_hook(arrived)  # type: ignore[no-untyped-call]

    def _guarded(self, check: Check) -> None:
        recorded = {key: self._values.recorded[key] for key in check.needs}
        trained = [key for key, value in recorded.items() if isinstance(value, torch.Tensor) and value.requires_grad]
        frozen = {key: _frozen(self._plan, key, value) for key, value in recorded.items()}
        symbols = dict(self._values.symbols)
        self._values_of[check] = (Values(bodies=self._plan.mirrors, recorded=frozen, symbols=symbols), trained)

    def compare(self) -> None:
        """Make the checks; the backward is done."""
        for each in list(self._values_of):
            try:
                super()._guarded(each)
            except Exception as error:
                # One site that can't be checked does not cost the others.
                if self._plan.strict:
                    raise
                self._found[each] = self._skipped(each, f"the check failed itself: {type(error).__name__}: {error}")
            del self._values_of[each]

    def _compared(self, check: Check) -> Compared:
        values, trained = self._values_of[check]
        if check not in self._gradients or check.new_out is None:
            raise NoValueError("no gradient came to the site's output")
        given = site_gradients.Given(
            values=values, trained=trained, gradient=self._gradients.pop(check), autocast=self._autocasts[check]
        )
        return site_gradients.check_site_gradients(check.site, check.body, check.new_out, given)

    def close(self) -> None:
        super().close()
        self._values_of.clear()
        self._gradients.clear()


def _frozen(plan: CheckPlan, key: Key, value: Any) -> Any:
    """What a tensor holds now, whoever writes to it later."""
    if not isinstance(value, torch.Tensor):
        return value
    body = next(body for body in plan.mirrors.values() if body.index == key.body)
    return value.detach().clone() if _may_be_written(body, key) else value.detach()


def _may_be_written(body: Body, key: Key) -> bool:
    node = body.named.get(key.name)
    return bool(body.written) and (node is None or bool(mutation.storages(node) & body.written))
