"""Every error and warning that a user can meet. Each has one message template: what happened, where, why, what to do.

An error is a dataclass: its fields fill its template (`{e.field}`), are readable by its handler, and are pickled.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, dataclass_transform

from attn_compiler.reasons.codes import Code

if TYPE_CHECKING:
    from attn_compiler.reasons.decisions import Reason


#: the most names in a message
_SHOWN = 3

_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class AttnCompilerWarning(UserWarning):
    """A warning: compilation went on, but something that was asked for was not done."""


@dataclass_transform(eq_default=False, kw_only_default=True)
class AttnCompilerError(Exception):
    """Base of every error of this package. A subclass has a `message` template, the fields that fill it, and a code to look up."""

    code: ClassVar[Code]
    message: ClassVar[str]

    def __init_subclass__(cls) -> None:
        dataclass(kw_only=True, eq=False, repr=False)(cls)

    def __post_init__(self) -> None:
        self.args = (f"{self.message.format(e=self)} ({self.code})",)

    def fields(self) -> dict[str, Any]:
        """Return the keyword arguments that build this error again."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[Any, ...]]:
        # BaseException would rebuild from the positional args, which a keyword-only class refuses.
        return _rebuild, (type(self), self.fields())


#: advice to show a caught exception, and to report it
REPRODUCE = "compile with options={'strict': True, 'dump_dir': 'attn_dumps'} and send the dump"


def described(error: BaseException) -> str:
    """Describe an exception in one line, with the last line of our code in its traceback: "KeyError: 'q' (match.py:31)"."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(_OWN_FOLDER)]
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{' '.join(f'{type(error).__name__}: {error}'.split())}{place}"


def shortened(names: Sequence[str]) -> str:
    """Join the first of many names, for a message."""
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _rebuild(cls: type[AttnCompilerError], fields: Mapping[str, Any]) -> Any:
    return cls(**fields)


class UnknownOption(AttnCompilerError):
    """A key of torch.compile's `options` that is neither ours nor Inductor's. ours, inductors: the valid names. instead: advice for a
    removed option."""

    code = Code.UNKNOWN_OPTION
    message = (
        "torch.compile(backend='attn_compiler', options=...): there is no option {e.option!r}. {e.suggestion} "
        "attn_compiler's own options: {e.own_names}; Inductor's: torch._inductor.list_options()"
    )

    option: str
    ours: tuple[str, ...]
    inductors: tuple[str, ...] = dataclasses.field(default=())
    instead: str = ""

    @property
    def nearest(self) -> tuple[str, ...]:
        """Up to three valid names, the likeliest first."""
        return nearest(self.option.removeprefix("attn."), (*self.ours, *self.inductors))

    @property
    def suggestion(self) -> str:
        if self.instead:
            return self.instead
        if not self.nearest:
            return "No valid option has a similar name."
        owners = (f"{name!r} ({'attn_compiler' if name in self.ours else 'Inductor'})" for name in self.nearest)
        return f"Nearest: {', '.join(owners)}."

    @property
    def own_names(self) -> str:
        return ", ".join(self.ours)


class InvalidOption(AttnCompilerError):
    """A known option with an invalid value. expected: the valid values, in words. value: the given one."""

    code = Code.INVALID_OPTION
    message = "torch.compile(backend='attn_compiler'): {e.option!r} takes {e.expected}, got {e.observed}"

    option: str
    expected: str
    value: Any

    @property
    def observed(self) -> str:
        return f"{self.value!r} ({type(self.value).__name__})"


class UnsupportedTorch(AttnCompilerError):
    """The installed torch is older than this package supports. minimum: e.g. "2.11"."""

    code = Code.UNSUPPORTED_TORCH
    message = (
        "torch {e.found} is not supported: attn_compiler needs torch {e.minimum} or newer. Install one: pip install "
        "'torch>={e.minimum}'"
    )

    found: str
    minimum: str


class LoweringUnavailable(AttnCompilerError):
    """options["lowering"] names a lowering that this machine can't run at all. target: the machine, in words."""

    code = Code.LOWERING_UNAVAILABLE
    message = (
        "options={{'lowering': {e.lowering!r}}} was asked for, but it is not available on {e.target}: {e.why}. "
        "`python -m attn_compiler doctor` lists what is; without this option the best available lowering is taken"
    )

    lowering: str
    target: str
    reasons: tuple[Reason, ...]

    @property
    def why(self) -> str:
        return "; and ".join(str(reason) for reason in self.reasons)


class NotAnExportedProgram(AttnCompilerError):
    """attn_compiler.rewrite was given something else. given: its class."""

    code = Code.NOT_AN_EXPORTED_PROGRAM
    message = (
        "attn_compiler.rewrite takes the torch.export.ExportedProgram that torch.export.export(model, args) returns, got {e.given}. A "
        "model that is not exported is compiled by torch.compile(model, backend='attn_compiler')"
    )

    given: str


class ExportUnsupported(AttnCompilerError):
    """attn_compiler.rewrite was asked for something that an exported program can't have. rule: the condition that has to hold. observed:
    the given value. remedy: advice."""

    code = Code.EXPORT_UNSUPPORTED
    message = "attn_compiler.rewrite: {e.rule}; got {e.observed}. {e.remedy}"

    rule: str
    observed: str
    remedy: str


class ContextParallelUnsupported(AttnCompilerError):
    """options["context_parallel"]: something in the model would be wrong on a part of the sequence. module: its path. source: its line of
    code. rule: the condition that has to hold. observed: the value found. remedy: advice."""

    code = Code.CONTEXT_PARALLEL_UNSUPPORTED
    message = (
        "options={{'context_parallel': ...}}: at {e.where}, a part of the sequence is not enough: {e.rule}; got {e.observed}.{e.advice} "
        "Nothing is left as the model made it under this option, whatever 'strict' says: each rank would compute something else"
    )

    module: str
    source: str | None
    rule: str
    observed: str
    remedy: str | None

    @property
    def where(self) -> str:
        return self.module if self.source is None else f"{self.module} ({self.source})"

    @property
    def advice(self) -> str:
        return "" if self.remedy is None else f" What to do: {self.remedy}."


class ContextParallelInput(AttnCompilerError):
    """A method of ContextParallel was given something that it can't split or join. call: the method. names: of the arguments. rule: the
    condition that has to hold. observed: the given value. remedy: advice."""

    code = Code.CONTEXT_PARALLEL_INPUT
    message = "ContextParallel.{e.call}({e.given}): {e.rule}; got {e.observed}. {e.remedy}"

    call: str
    names: tuple[str, ...]
    rule: str
    observed: str
    remedy: str

    @property
    def given(self) -> str:
        return ", ".join(f"{name}=" for name in self.names)


class PassFailed(AttnCompilerError):
    """A pass raised. site: module path, or the graph's name. cause: the exception's text. reproduce: how to see it."""

    code = Code.PASS_FAILED
    message = (
        "attn_compiler's pass {e.pass_name!r} failed at {e.site}: {e.cause}. Without strict=True what it failed on is left as "
        "it was, and the model stays correct. To reproduce: {e.reproduce}"
    )

    pass_name: str
    site: str
    cause: str
    reproduce: str


class CompileFailed(AttnCompilerError):
    """Something of ours failed outside of the passes, or the inner compiler failed on our graph. step: the failed step. graph: its name in
    the report. cause: the exception's text. instead: the fallback without strict=True."""

    code = Code.COMPILE_FAILED
    message = "attn_compiler failed to {e.step} (graph {e.graph}): {e.cause}. Without strict=True {e.instead}. To reproduce: {e.reproduce}"

    step: str
    graph: str
    cause: str
    instead: str
    reproduce: str = REPRODUCE


class KernelFailed(AttnCompilerError):
    """A kernel could not be compiled, or did not start. op: the leaf op of the kernel. step: the failed step. cause: the exception's text.
    instead: the fallback without strict=True."""

    code = Code.KERNEL_FAILED
    message = "attn_compiler's kernel {e.op!r} did not {e.step}: {e.cause}. Without strict=True {e.instead}. To reproduce: {e.reproduce}"

    op: str
    step: str
    cause: str
    instead: str
    reproduce: str = REPRODUCE


class VerifyFailed(AttnCompilerError):
    """A pass broke an invariant of the graph. invariant: the condition that has to hold. observed: the value found."""

    code = Code.VERIFY_FAILED
    message = (
        "after attn_compiler's pass {e.pass_name!r}, at {e.site}, it no longer holds that {e.invariant}: {e.observed}. "
        "This is a bug of attn_compiler; options={{'dump_dir': ...}} writes the graphs before and after each pass"
    )

    pass_name: str
    site: str
    invariant: str
    observed: str


class VerificationMismatch(AttnCompilerError):
    """options={"verify": True}, first call or first backward: a replaced attention differs from the model's own.

    site: the attention's path, or "graph 0/0" for a whole graph. what: "recovered mask", "recovered bias", "output of <lowering>"; of a
    graph "output 0 of the graph", "length as the graph left it", "gradient of layers.0.weight". formula: the mask, or the bias, as it was
    read; of a graph its attentions. index: the worst element. expected, observed: the model's value and ours there. allowed: the largest
    allowed difference. differing: the number of wrong elements. until: advice for the meantime.
    """

    code = Code.VERIFICATION_MISMATCH
    message = (
        "options={{'verify': True}}: at {e.site}, the {e.what} is not the model's own. As it was read: {e.formula}. "
        "Worst element: {e.index}; there the model has {e.expected}, attn_compiler {e.observed}; allowed is {e.allowed}; "
        "{e.differing} differ. This is a bug of attn_compiler: please report it, with the dump that "
        "options={{'dump_dir': ...}} writes. Until then, {e.until}"
    )

    site: str
    what: str
    formula: str
    index: str
    expected: str
    observed: str
    allowed: str
    differing: str
    until: str = "options={'lowering': 'untouched'} leaves every attention as the model made it"


class CudnnRefused(AttnCompilerError):
    """cuDNN does not build a graph, or can't be used. said: its own message, in one line. While a graph is compiled, the error becomes the
    reason for another lowering."""

    code = Code.CUDNN_REFUSED
    message = (
        "cuDNN runs no plan for this attention: {e.said}. Another kernel serves it: compile with options={{'lowerings': [...]}} and "
        "leave out 'cudnn'"
    )

    said: str


class ReportNotSaved(AttnCompilerError):
    """`save` of a report could not write its file. path: of the file. cause: the system's message."""

    code = Code.REPORT_NOT_SAVED
    message = (
        "the report could not be written to {e.path!r}: {e.cause}. Give save() the name of a file in a directory that exists and can be "
        "written, such as 'report.html'"
    )

    path: str
    cause: str


class CannotCompare(AttnCompilerError):
    """`compare` or `explain` was given something that it can't run. call: which of the two. rule: the condition that has to hold. observed:
    the given value. remedy: advice."""

    code = Code.CANNOT_COMPARE
    message = "attn_compiler.{e.call}: {e.rule}; got {e.observed}. {e.remedy}"

    call: str
    rule: str
    observed: str
    remedy: str


def nearest(name: str, candidates: Iterable[str], limit: int = 3) -> tuple[str, ...]:
    """The candidates that `name` may be the beginning or a misspelling of, the likeliest first."""
    known = list(candidates)
    begun = [one for one in known if name and one.startswith(name)]
    return tuple(dict.fromkeys((*begun, *difflib.get_close_matches(name, known, n=limit))))[:limit]
