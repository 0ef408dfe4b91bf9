"""Data of a report: of a site, a miss, padding, one graph. report.py makes tables, pages and JSON of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from attn_compiler.reasons.decisions import Copy, Decision, Estimate, Evidence, Faster, Reason
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.linear import LinearSpec

#: From this share of real tokens on, the padded graph is faster (measured on an H200: 0.74 to 0.92, by model).
NEARLY_FULL = 0.85
STEPS_KEPT = 16
#: the failed fact of a batch that ran padded without a wait
MUCH_PADDING = "the batches before have padding to leave out"
#: the condition of a packed call that fails where packing takes as long as the padding that it leaves out
LITTLE_SAVED = "leaving tokens out saves more than it takes"


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpaddedStep:
    """One call.

    number: of the tokens that are computed: real ones, and a shared one once. positions: of the batch. fill: their ratio.
    groups: the number of different rows at the first position; None where rows share nothing.
    failed: the facts that did not hold, so it ran padded.
    """

    fill: float = field(init=False)
    number: int
    positions: int
    groups: int | None = None
    failed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "fill", self.number / max(self.positions, 1))

    @property
    def is_better_padded(self) -> bool:
        """True if the packed graph can't run, or would not gain."""
        return self.fill >= NEARLY_FULL or bool(set(self.failed) - {MUCH_PADDING})


@dataclass(kw_only=True, slots=True, eq=False)
class Steps:
    """The last calls of one graph whose padding was asked for."""

    last: deque[UnpaddedStep] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))

    @property
    def are_all_padded(self) -> bool:
        """True if STEPS_KEPT calls waited for their padding and none could be packed."""
        return len(self.last) == STEPS_KEPT and all(
            step.failed and not {MUCH_PADDING, LITTLE_SAVED} & {*step.failed} for step in self.last
        )


def _counted(modules: Sequence[str]) -> str:
    return modules[0] if len(modules) == 1 else f"{modules[0]} ×{len(modules)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteReport:
    """Every site that shares one spec, decision and set of copies (one row of the table).

    modules: the module paths, one a site. notes: further changes of the rewrite (a repeat_kv removed, a mask combined).
    source: the line of the model that the first of them was traced from ("llama.py:120"), if known.
    evidence: the measurement that ordered the lowerings; None if the user ordered them, or such a machine was not measured.
    estimate: the time of one call; None if nothing like it was measured.
    faster: a lowering measured to be faster on such sites, of a package that is not installed; None without one.
    texts: of the leaf ops that compute it, the keys of their failures.
    reads_pairs: the lowering reads a mask or bias with an element for each pair of a query and a key.
    remedies: lines of the model's code that spare copies or make the mask known.
    target, options: as in GraphReport, and the options of the compilation that are not the default, as JSON.
    """

    modules: tuple[str, ...]
    pattern: str
    spec: AttentionSpec
    decision: Decision
    copies: tuple[Copy, ...] = ()
    notes: tuple[str, ...] = ()
    source: str | None = None
    evidence: Evidence | None = None
    estimate: Estimate | None = None
    faster: Faster | None = None
    texts: tuple[str, ...] = ()
    reads_pairs: bool = False
    remedies: tuple[str, ...] = ()
    target: str = ""
    options: str = "{}"

    def __str__(self) -> str:
        where = f"{_counted(self.modules)} ({self.source}) on {self.target}"
        return f"{where}: {self.decision.lowering}, mask {self.spec.mask.words}"

    def repro(self) -> str:
        """Return a program that computes the first of these sites alone, on random inputs, and times it: what a bug report holds."""
        from attn_compiler.reporting import repro

        return repro.script(self.spec, f"{self}.", self.options)

    @property
    def proved_as_dense(self) -> bool:
        """True if all that the tensor over pairs holds was proved, and it is read all the same."""
        return self.reads_pairs and self.spec.is_proved


@dataclass(frozen=True, kw_only=True, slots=True)
class MissReport:
    """An anchor (a softmax or an SDPA call) that no pattern matches. nearest: the pattern that came furthest. source: the line of the model
    that the first of them was traced from, if known."""

    modules: tuple[str, ...]
    anchor: str
    nearest: str
    stopped_at: str
    reason: Reason
    source: str | None = None

    def __str__(self) -> str:
        return f"{_counted(self.modules)} ({self.source}): {self.anchor} was missed: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearReport:
    """Every layer of linear attention that shares one spec and decision. Its function was proved to be the recurrence. modules: as in
    SiteReport. evidence: the measurement behind the choice, and its date."""

    modules: tuple[str, ...]
    spec: LinearSpec
    decision: Decision
    evidence: str | None = None

    def __str__(self) -> str:
        return f"{_counted(self.modules)}: {self.decision.lowering}, {self.function}"

    @property
    def function(self) -> str:
        """The model's function, by its module and name."""
        return self.spec.form.function.partition("#")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpadReport:
    """Packing of a graph's tokens (`options={"unpad": True}`, or `share_prefix`).

    kept: why padding is computed as in the model, or shared prompts are for each row; None: they are not.
    shares: what rows share is computed once (`options={"share_prefix": True}`).
    module, source: of the op that is to blame, if there is one.
    zeroed: outputs that are 0 at padding.
    facts: conditions of each call; else the model's own graph runs.
    notes: further remarks.
    steps: the last calls.
    """

    kept: Reason | None = None
    shares: bool = False
    module: str | None = None
    source: str | None = None
    zeroed: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    steps: Steps | None = field(default=None, compare=False)

    @property
    def last(self) -> tuple[UnpaddedStep, ...]:
        """The last calls, up to now: the real share of each batch, and the failed conditions if padding was computed."""
        return () if self.steps is None else tuple(self.steps.last)

    @property
    def title(self) -> str:
        """The subject, for people."""
        return "shared prompts" if self.shares else "padding"

    @property
    def result(self) -> str:
        if self.kept is not None:
            return "computed for each row" if self.shares else "computed"
        return "computed once" if self.shares else "left out"


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphReport:
    """One graph handed to the backend.

    graph: its name in PyTorch's logs ("0/0"). model: the class of the module that it was traced from, or the name of the function.
    seconds: time by pass.
    kernels: seconds by kernel that was compiled beside the inner compiler so far, of all its variants; next to nothing if it was on disk.
        Those of a backward are there once it ran.
    failure: set when something failed and the model's own graph was compiled.
    faults: failures that cost only a site or a call, each with the text of its warning.
    from_cache: the passes did not run; their earlier result for the same graph was reused.
    not_kept: why the next process has to run the passes again, if it has to.
    unpad: the result of unpadding; None if nobody asked for it.
    untried: installed releases that are newer than all that this version was tried with.
    linear: layers of linear attention whose functions were captured.
    compiled_in: seconds from Dynamo's graph to its code, the passes included; None if nothing was compiled.
    dumped: the directory with the graph before and after each pass; None if nobody asked for it.
    """

    graph: str
    target: str
    model: str | None = None
    sites: tuple[SiteReport, ...] = ()
    misses: tuple[MissReport, ...] = ()
    seconds: tuple[tuple[str, float], ...] = ()
    kernels: Sequence[tuple[str, float]] = ()
    failure: str | None = None
    faults: tuple[str, ...] = ()
    from_cache: bool = False
    not_kept: str | None = None
    untried: tuple[str, ...] = ()
    unpad: UnpadReport | None = None
    linear: tuple[LinearReport, ...] = ()
    compiled_in: float | None = field(default=None, compare=False)
    dumped: str | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """Its name for people: "0/0 of LlamaModel". Graphs of several models may be 0/0."""
        return self.graph if self.model is None else f"{self.graph} of {self.model}"

    @property
    def num_linear(self) -> int:
        return sum(len(one.modules) for one in self.linear)

    @property
    def num_sites(self) -> int:
        return sum(len(site.modules) for site in self.sites)

    @property
    def num_misses(self) -> int:
        return sum(len(miss.modules) for miss in self.misses)

    @property
    def total_seconds(self) -> float:
        return sum(seconds for _, seconds in self.seconds)
