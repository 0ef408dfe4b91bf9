"""Kernels that failed in this process, when they were compiled or at their first launch, and the code that calls them.

A failure costs the sites whose leaf op has that text: they are decided again without the lowering (`reasons`), and their compiled code is
compiled again before its next call. The call in which a launch fails is computed by its definition (by_definition.py). Imports no torch.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.reasons.errors import REPRODUCE, AttnCompilerWarning, KernelFailed, described
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.linear import LinearSpec

log = logging.getLogger(__name__)

#: Name of PyTorch's error for memory that ran out. Computing in another way does not help then.
_NO_MEMORY = "OutOfMemoryError"


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Compiled code that calls a leaf op, and the decision for its site.

    strict: as the option of that name.
    start_over: has the code compiled again before its next call.
    """

    lowering: str
    spec: AttentionSpec | LinearSpec
    strict: bool = False
    start_over: Callable[[], None] | None = None


@dataclass(kw_only=True)
class Failures:
    """Failures of one process.

    callers: by the text of the leaf op that they call.
    causes: of failures, by text.
    decided: causes by lowering and spec.
    """

    callers: dict[str, list[Caller]] = field(default_factory=dict)
    causes: dict[str, str] = field(default_factory=dict)
    decided: dict[tuple[str, AttentionSpec | LinearSpec], str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def watch(self, texts: Iterable[str], caller: Caller) -> None:
        """Register a caller for failures of these texts."""
        with self.lock:
            for text in texts:
                known = self.callers.setdefault(text, [])
                if caller not in known:
                    known.append(caller)

    def fail(self, text: str, cause: str) -> list[Caller]:
        """Record a failure. Returns the affected callers."""
        with self.lock:
            self.causes[text] = cause
            found = list(self.callers.get(text, ()))
            self.decided.update({(caller.lowering, caller.spec): cause for caller in found})
        return found

    def reasons(self, lowering: str, spec: AttentionSpec | LinearSpec) -> list[Reason]:
        """Return why a lowering is not chosen again for a spec."""
        cause = self.decided.get((lowering, spec))
        if cause is None:
            return []
        rule = "its kernels compile and start on this machine"
        remedy = f"another kernel serves until the process ends; to reproduce: {REPRODUCE}"
        return refuse(Code.NOT_COMPILED, rule, cause, remedy)

    def forget(self) -> None:
        """Forget all failures and callers."""
        with self.lock:
            self.callers.clear()
            self.causes.clear()
            self.decided.clear()


#: the failures of this process
FAILURES = Failures()


def is_ours(error: Exception) -> bool:
    """Return whether computing in another way may succeed after this error."""
    return type(error).__name__ != _NO_MEMORY


def at_compilation(op: str, text: str, error: Exception) -> list[Caller]:
    """Report a kernel that does not compile. Returns the affected callers. Raises as `at_launch`."""
    concerned = FAILURES.fail(text, described(error)) if text else []
    if concerned:
        _tell(op, "compile", error, concerned, "its graph is compiled again without it")
    else:
        log.warning("a kernel of %s was not compiled ahead of its launch: %r", op, error)
    return concerned


def at_launch(op: str, text: str, error: Exception, seconds: float) -> None:
    """Report a failed launch, whose call took so many seconds with its definition. Raises KernelFailed for code compiled with
    strict=True."""
    concerned = FAILURES.fail(text, described(error))
    _tell(op, "start", error, concerned, "this call is computed without it, and its graph is compiled again")
    log.warning("what was begun of %s and the same by its definition took %.2f s", op, seconds)
    for start_over in {caller.start_over for caller in concerned if caller.start_over is not None}:
        start_over()


def _tell(op: str, step: str, error: Exception, concerned: Iterable[Caller], instead: str) -> None:
    said = KernelFailed(op=op, step=step, cause=described(error), instead=instead)
    if any(caller.strict for caller in concerned):
        raise said from error
    warnings.warn(str(said), AttnCompilerWarning, stacklevel=2)
