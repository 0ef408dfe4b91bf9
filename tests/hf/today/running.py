"""One call of one model: what is found of its attention, what is proved, and what each machine would choose.

The model's own graphs run, under the independent counter: a kernel would want a machine, and a real model has no numbers.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import fx, nn

from attn_compiler.compiling import left_to_python
from attn_compiler.lowerings import by_name
from attn_compiler.options.options import Options
from attn_compiler.passes import rewrite
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.passes.spelling import flex, library_calls
from attn_compiler.passes.writing.select import decide
from attn_compiler.reasons.decisions import Decision
from attn_compiler.reporting.facts import SiteReport
from attn_compiler.reporting.report import Report
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import compat as torch_compat, known_masks, observe as torch_observe
from tests.hf import mask_kinds
from tests.hf.counting import AttentionCounter
from tests.hf.packages import Unavailable
from tests.hf.today.model import Call, Model

TARGETS: Mapping[str, Target] = {
    "sm80": Target.fake(sm=80, processors=108),
    "sm89": Target.fake(sm=89, processors=128),
    "sm90": Target.fake(),
    "sm100": Target.fake(sm=100, processors=148),
}
#: what no attention should come to: the model's own products, or PyTorch's plain ones
SLOW = frozenset({"untouched", "math", "sdpa_math", "reference"})
NONE, PROVED, PARTLY, DATA = "none", "proved", "partly", "data"


@dataclass(frozen=True, kw_only=True)
class Row:
    """status: "ok", "error" (the model fails, or we do), or "unavailable" (a package is missing). detail: why.

    found, total: attention sites, and those in the graphs by the independent counter. misses: each with its reason.
    masks: sites by what became of their mask. unproved: why, for those that are not proved.
    kernels: sites by lowering, for each machine. why: what else was asked first, where a machine has a slow one, or reads a dense mask.
    """

    model: str
    call: str
    device: str
    status: str = "ok"
    found: int = 0
    total: int = 0
    misses: Mapping[str, int] = field(default_factory=dict)
    masks: Mapping[str, int] = field(default_factory=dict)
    unproved: tuple[str, ...] = ()
    kernels: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    why: tuple[str, ...] = ()
    graphs: int = 0
    seconds: float = 0.0
    detail: str = ""

    def slow(self, machine: str) -> int:
        return sum(count for name, count in self.kernels.get(machine, {}).items() if name in SLOW)


class Watching:
    """A torch.compile backend: reports of what attn_compiler makes of each graph, how often it ran, and a count of its attentions."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.runs: list[int] = []
        self.counter = AttentionCounter()

    def __call__(self, gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        rewritten = rewrite(gm, Options(inner="eager", cache_rewrites=False))
        rewritten.take_back(gm)
        for module in torch_compat.graph_modules(gm):
            _forget_unread(module.graph)
            module.recompile()
        index = self._kept(rewritten.report, 0)

        def counted(*args: Any) -> Any:
            self.runs[index] += 1
            with self.counter:
                return gm.forward(*args)

        return known_masks.wrap(counted, rewritten.known, rewritten.read)

    def begin(self) -> None:
        """Count what runs from now on. Graphs stay."""
        self.runs[:] = [0] * len(self.runs)
        self.counter = AttentionCounter()

    def left(self, found: torch_observe.Break) -> None:
        told = left_to_python.report(found)
        if told is not None:
            self._kept(told, 1)

    def _kept(self, report: Report, runs: int) -> int:
        self.reports.append(report)
        self.runs.append(runs)
        return len(self.runs) - 1

    @property
    def sites(self) -> list[tuple[SiteReport, int]]:
        pairs = zip(self.reports, self.runs, strict=True)
        return [(site, len(site.modules) * runs) for report, runs in pairs for site in report.sites]


def _forget_unread(graph: fx.Graph) -> None:
    """Take out each softmax whose result nothing reads, which is no attention: SAM 2 has them."""
    for node in reversed(list(graph.nodes)):
        if not node.users and target_name(node) in ("softmax", "to"):
            graph.erase_node(node)


def rows(model: Model, only: str = "") -> list[Row]:
    """A row a call. What the model or we raise is a row, too. only: what a call's name has to have in it."""
    chosen = [call for call in model.calls if only in call.name]
    try:
        built = model.build()
    except Unavailable as missing:
        return [failed(model, call, "unavailable", str(missing)) for call in chosen]
    except Exception as error:  # noqa: BLE001 - one broken model is a row of the table, not the end of it
        return [failed(model, call, "error", f"{type(error).__name__}: {error}") for call in chosen]
    return [_row(model, built, call) for call in chosen]


def _row(model: Model, built: nn.Module, call: Call) -> Row:
    torch._dynamo.reset()
    watching = Watching()
    started = time.perf_counter()
    try:
        _run(built, call, watching)
    except Exception as error:  # noqa: BLE001 - as above
        return failed(model, call, "error", f"{type(error).__name__}: {error}")
    finally:
        torch._dynamo.reset()
    return described(model, call, watching, time.perf_counter() - started)


def _run(built: Any, call: Call, watching: Watching) -> None:
    built.train(call.training)
    if call.checkpoint:
        built.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        compiled = torch.compile(built, backend=watching)
        inputs = call.inputs(built)
        with torch.set_grad_enabled(call.training), torch_observe.breaks_told(watching, watching.left):
            compiled(**inputs)
    finally:
        if call.checkpoint:
            built.gradient_checkpointing_disable()


def failed(model: Model, call: Call, status: str, detail: str) -> Row:
    return Row(
        model=model.name, call=call.name, device=model.device, status=status, detail=" ".join(detail.split())[:300]
    )


def described(model: Model, call: Call, watching: Watching, seconds: float) -> Row:
    masks: Counter[str] = Counter()
    misses: Counter[str] = Counter()
    kernels: dict[str, Counter[str]] = {machine: Counter() for machine in TARGETS}
    unproved: dict[str, None] = {}
    why: dict[str, None] = {}
    for site, count in filter(itemgetter(1), watching.sites):
        masks[state_of(site)] += count
        if state_of(site) in (PARTLY, DATA):
            unproved[_alike(site.spec.mask.reason or site.spec.mask.words)] = None
        for machine, target in TARGETS.items():
            decision = chosen(site, target)
            stars = _stars(site, decision, target)
            kernels[machine][f"{decision.lowering}{stars}"] += count
            if decision.lowering in SLOW or stars:
                why[f"{machine}: {_alike(_instead_of(decision))}"] = None
    for report, runs in zip(watching.reports, watching.runs, strict=True):
        for miss in report.misses:
            misses[f"{miss.reason.code} {miss.anchor}: {miss.reason.observed}"] += len(miss.modules) * runs
    return Row(
        model=model.name,
        call=call.name,
        device=model.device,
        found=sum(count for _, count in watching.sites),
        total=watching.counter.sites,
        misses=misses,
        masks=masks,
        unproved=tuple(unproved),
        kernels=kernels,
        why=tuple(why),
        graphs=sum(bool(report.sites or report.misses) for report in watching.reports),
        seconds=seconds,
    )


def state_of(site: SiteReport) -> str:
    """Whether there is a mask, and whether it was proved as a whole, in part, or is data to us."""
    kind = mask_kinds.kind_of(site)
    if kind == mask_kinds.NO_MASK:
        return NONE if site.spec.mask.reason is None else DATA
    if site.spec.mask.is_partial and mask_kinds.DENSE in kind:
        return PARTLY
    return DATA if kind in (mask_kinds.DENSE, mask_kinds.READY_MADE) else PROVED


def chosen(site: SiteReport, target: Target) -> Decision:
    """The decision for the same attention on a machine."""
    of_flex = site.pattern in (flex.NAME, library_calls.NAME)
    return decide(dataclasses.replace(site.spec, device="cuda"), target, Options(), of_flex)


def _stars(site: SiteReport, decision: Decision, target: Target) -> str:
    """One where PyTorch's kernel reads a number for each pair of a query and a key; two where any does, and all of them are proved."""
    if decision.lowering in SLOW or not by_name(decision.lowering).reads_pairs(site.spec, target):
        return ""
    return "**" if site.spec.is_proved else "*" * decision.lowering.startswith("sdpa_")


def _alike(text: str) -> str:
    """The same for the same thing in every layer: "sigmoid" for "sigmoid_3"."""
    return re.sub(r"(?<=[a-z])_\d+\b", "", text)


def _instead_of(decision: Decision) -> str:
    """What our kernels refused, or that none was asked."""
    refused = [(refusal.lowering, refusal.reasons[0]) for refusal in decision.refusals if refusal.reasons]
    own = [(name, reason) for name, reason in refused if not name.startswith(("sdpa_", "absorbed"))]
    if not own and decision.lowering not in SLOW:
        return f"{decision.lowering} comes first"
    name, reason = (own or refused)[-1]
    return f"{decision.lowering}, since {name} wants: {reason.rule}; observed: {reason.observed}"
