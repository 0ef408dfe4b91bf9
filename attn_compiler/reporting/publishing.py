"""Publication of reports: `publish` hands out the backend's, `reports` returns the last ones to the user."""

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
#: held for reads and writes: a deque that grows while it is read raises
_lock = threading.Lock()


def reports() -> Reports:
    """Return the reports of the last 64 graphs compiled in this process, oldest first."""
    with _lock:
        return Reports(_published)


def reset() -> None:
    """Forget every report, and every verification."""
    with _lock:
        _published.clear()
    results.forget()


@contextlib.contextmanager
def collected() -> Iterator[list[Report]]:
    """Collect the block's reports, and remove them from those of `reports` after it."""
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
    """Keep the report, log it, and add it to PyTorch's counters and, with its options, to TORCH_TRACE.

    The log is a line at INFO and the table at DEBUG, so TORCH_LOGS="+attn_compiler" shows the table. The line of the first graph with
    content also names the masks with their lowerings, and the way to the rest.
    """
    with _lock:
        is_first = wording.has_content(report) and not any(map(wording.has_content, _published))
        _published.append(report)
    log.info("%s", wording.introduction(report) if is_first else wording.summary(report))
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s", report.details())
    dump.finished(report)
    torch_observe.add_to_counters(counts(report))
    torch_compat.trace_artifact(
        "attn_compiler_report",
        lambda: json.dumps({**report.to_dict(), "options": options.to_dict()}, indent=1),
        encoding="json",
    )


def counts(report: Report) -> Counter[str]:
    """Return the additions to torch._dynamo.utils.counters["attn_compiler"].

    Graphs, sites, misses, failures (of whole graphs), faults (of parts), from_cache (graphs whose passes did not run), and
    "lowering:<name>".
    """
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
    counted.update({f"lowering:{name}": count for name, count in wording.lowerings(report.sites).items()})
    return counted
