"""Where reports go: `publish` is how the backend hands one out, `reports` is where a user finds the last ones."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import Counter, deque
from collections.abc import Iterator

from attn_compiler.options.options import Options
from attn_compiler.reporting import dump, verifications as results, wording
from attn_compiler.reporting.report import Report, Reports
from attn_compiler.torch_private import compat as torch_compat, observe as torch_observe

log = logging.getLogger(__name__)

KEPT_REPORTS = 64

_published: deque[Report] = deque(maxlen=KEPT_REPORTS)
#: held by who reads or writes them: a deque that grows while it is read raises
_lock = threading.Lock()


def reports() -> Reports:
    """The reports of the last 64 graphs that were compiled in this process, oldest first."""
    with _lock:
        return Reports(_published)


def reset() -> None:
    """Forget every report, and every verification."""
    with _lock:
        _published.clear()
    results.forget()


@contextlib.contextmanager
def apart() -> Iterator[list[Report]]:
    """Of the block: its reports, which are not among those that `reports` gives after it."""
    with _lock:
        before = list(_published)
        _published.clear()
    found: list[Report] = []
    try:
        yield found
    finally:
        with _lock:
            found += _published
            _published.clear()
            _published.extend(before)


def publish(report: Report, options: Options) -> None:
    """Keep the report, log it, and put it into PyTorch's own counters and, with the options it was made under, into TORCH_TRACE.

    The log is a line at INFO and the table at DEBUG, so TORCH_LOGS="+attn_compiler" shows the table. The line of the first graph that has
    something to tell says more: which masks got which lowerings, and how to see the rest.
    """
    with _lock:
        is_first = wording.has_content(report) and not any(map(wording.has_content, _published))
        _published.append(report)
    log.info("%s", wording.introduction(report) if is_first else wording.summary(report))
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s", report)
    dump.finished(report)
    torch_observe.add_to_counters(counts(report))
    torch_compat.trace_artifact(
        "attn_compiler_report",
        lambda: json.dumps({**report.to_dict(), "options": options.to_dict()}, indent=1),
        encoding="json",
    )


def counts(report: Report) -> Counter[str]:
    """What torch._dynamo.utils.counters["attn_compiler"] gains: graphs, sites, misses, failures (of whole graphs), faults (of parts),
    from_cache (graphs whose passes did not run), and "lowering:<name>"."""
    counted = Counter(
        graphs=1,
        sites=report.num_sites,
        misses=report.num_misses,
        failures=int(report.failure is not None),
    )
    if report.faults:
        counted["faults"] = len(report.faults)
    if report.from_cache:
        counted["from_cache"] = 1
    for site in report.sites:
        counted[f"lowering:{site.decision.lowering}"] += len(site.modules)
    return counted
