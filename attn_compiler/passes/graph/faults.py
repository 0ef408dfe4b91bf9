"""One fault costs one thing: an exception at one site, or one call, is caught here, and only that one is left as it was.

The user's messages are made here, too: the reason in the report, and one warning for each distinct fault of a graph.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.reasons.errors import REPRODUCE, AttnCompilerWarning, PassFailed, described, shortened
from attn_compiler.torch_private import compat as torch_compat


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """An exception of a pass at one site. site: the module that was worked on. cause: the exception in words."""

    pass_name: str
    site: str
    cause: str


@dataclass(kw_only=True, eq=False)
class Log:
    """Notes on one graph while the steps work on it.

    strict: a fault is raised.
    current: the module whose site is being worked on, for messages.
    faults: exceptions that cost one site each.
    unread: failures in reading masks, which stay tensors (recover.py).
    left_alone: the reason why the whole graph is left as it is; None if it is not.
    """

    strict: bool
    current: str = ""
    faults: list[Fault] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    left_alone: Reason | None = None


@dataclass(kw_only=True, slots=True)
class Attempt:
    """The outcome of the block of `confined`. reason: None if it went through."""

    reason: Reason | None = None


@contextlib.contextmanager
def confined(log: Log, pass_name: str, site: str) -> Iterator[Attempt]:
    """Catch exceptions of the block, note them in the log and give them as a reason; raise PassFailed if the log is strict.

    The block has to leave no trace when it raises. Exceptions that make Dynamo start over pass through.
    """
    attempt = Attempt()
    try:
        yield attempt
    except Exception as error:
        # A PassFailed, which already says where it failed, comes from a block within this one.
        if torch_compat.starts_over(error) or isinstance(error, PassFailed):
            raise
        cause = described(error)
        if log.strict:
            raise failed(pass_name, site, error) from error
        log.faults.append(Fault(pass_name=pass_name, site=site, cause=cause))
        attempt.reason = Reason(
            code=Code.FAULT,
            rule=f"the pass {pass_name!r} works on it without an exception",
            observed=cause,
            remedy=REPRODUCE,
        )


def failed(pass_name: str, site: str, error: Exception) -> PassFailed:
    """Return an exception of a pass as an error that names the pass and the site."""
    return PassFailed(pass_name=pass_name, site=site, cause=described(error), reproduce=REPRODUCE)


def warned(logs: Iterable[Log]) -> tuple[str, ...]:
    """Warn once for each distinct fault, wherever it was met, and return the texts."""
    places: dict[tuple[str, str], list[str]] = {}
    for fault in (fault for log in logs for fault in log.faults):
        places.setdefault((fault.pass_name, fault.cause), []).append(fault.site)
    texts = tuple(_words(name, cause, sites) for (name, cause), sites in places.items())
    for text in texts:
        warnings.warn(text, AttnCompilerWarning, stacklevel=2)
    return texts


def _words(pass_name: str, cause: str, sites: list[str]) -> str:
    return (
        f"attn_compiler's pass {pass_name!r} failed at {shortened(list(dict.fromkeys(sites)))}: {cause}. There the model's own "
        f"computation is kept; the rest of the graph is worked on as usual. To reproduce: {REPRODUCE}"
    )
