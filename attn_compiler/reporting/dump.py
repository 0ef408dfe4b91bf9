"""Graphs before and after each pass, as readable files with diffs, and the same in TORCH_TRACE for tlparse.

The files of one graph:

    <dump_dir>/<graph>/02_lower.before.txt   the graph and the graphs nested in it: dtypes, shapes, strides, source lines
                       02_lower.after.txt
                       02_lower.diff.txt     the change of each op's count, and the unified diff
                       01_mirror.txt         any text that a pass wrote by `text`, under the pass's number
                       report.json, report.txt, report.html
"""

from __future__ import annotations

import contextlib
import difflib
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx

from attn_compiler.reasons.errors import AttnCompilerWarning
from attn_compiler.reporting.report import Report
from attn_compiler.torch_private import compat as torch_compat, observe as torch_observe

ARTIFACT_PREFIX = "attn_compiler_"

# "; x = y = None" in fx's generated code frees values. It moves with every change and tells nothing.
_DROPPED_VALUES = re.compile(r";\s+(?:\w+ = )+None$", re.MULTILINE)


class Dumper:
    """Writer of one graph's dumps; made by `create`. With no dump_dir and no TORCH_TRACE it does nothing and formats nothing."""

    def __init__(self, *, directory: Path | None, traced: bool) -> None:
        self._directory = directory
        self._traced = traced
        self._passes = 0
        self._written: Counter[str] = Counter()

    @classmethod
    def create(cls, dump_dir: str | None, graph_name: str) -> Dumper:
        """Return a dumper into a new directory under `dump_dir`, named after the graph (and the rank, if there are several). An existing
        directory is never written into: the second dump of a graph called "0/0" goes to "0_0-2"."""
        dumper = cls(directory=None, traced=torch_observe.is_traced())
        if dump_dir is not None:
            with dumper._error_ends_dump(dump_dir):
                dumper._directory = _new_directory(dump_dir, _file_name(graph_name))
        return dumper

    @property
    def directory(self) -> str | None:
        """The directory of the files; None if there are none."""
        return None if self._directory is None else str(self._directory)

    @property
    def enabled(self) -> bool:
        return self._directory is not None or self._traced

    @contextlib.contextmanager
    def around(self, pass_name: str, gm: fx.GraphModule) -> Iterator[None]:
        """Dump `gm` before and after the block. If the block raises, the graph is dumped in its current state."""
        self._passes += 1
        if not self.enabled:
            yield
            return
        before, ops_before = "", Counter[str]()
        with self._error_ends_dump():
            before, ops_before = graph_text(gm), op_counts(gm)
            self._write(f"{pass_name}.before", before)
        try:
            yield
        finally:
            with self._error_ends_dump():
                if self.enabled:
                    after = graph_text(gm)
                    self._write(f"{pass_name}.after", after)
                    diff = f"{op_diff(ops_before, op_counts(gm))}\n\n{_text_diff(before, after)}"
                    self._write(f"{pass_name}.diff", diff)

    def graph(self, name: str, graph: fx.Graph) -> None:
        """Dump another graph than the one being rewritten, such as the ATen mirror."""
        self.text(name, lambda: code_of(graph))

    def text(self, name: str, make: Callable[[], str]) -> None:
        """Dump a text. make: called only if something is written."""
        if self.enabled:
            with self._error_ends_dump():
                self._write(name, make())

    def report(self, report: Report) -> None:
        """Write report.json, report.txt and report.html. (TORCH_TRACE gets the report from `publish`.)"""
        if self._directory is not None:
            with self._error_ends_dump():
                self._write_file("report.json", report.to_json())
                self._write_file("report.txt", report.details())
                self._write_file("report.html", report.to_html())

    @contextlib.contextmanager
    def _error_ends_dump(self, place: str = "TORCH_TRACE") -> Iterator[None]:
        """Report an error of a dump, and end the dump; compilation goes on. place: the target, if there is no directory."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (no dump is worth a model that does not run)
            # repr escapes characters that no terminal can show.
            warnings.warn(
                f"attn_compiler could not write the dump to {str(self._directory or place)!r}: {type(error).__name__}: {error}. "
                "Compilation goes on without it. Give a directory that can be written, by options={'dump_dir': ...} or "
                "ATTN_COMPILER_DUMP_DIR",
                AttnCompilerWarning,
                stacklevel=2,
            )
            # The trace goes on if only the directory could not be made.
            self._traced = self._traced and self._directory is None and place != "TORCH_TRACE"
            self._directory = None

    def _write(self, name: str, text: str) -> None:
        stem = f"{self._passes:02d}_{_file_name(name)}"
        self._written[stem] += 1
        if self._written[stem] > 1:
            stem += f"-{self._written[stem]}"
        if self._directory is not None:
            self._write_file(f"{stem}.txt", text)
        if self._traced:
            torch_compat.trace_artifact(ARTIFACT_PREFIX + stem, lambda: text)

    def _write_file(self, name: str, text: str) -> None:
        if self._directory is not None:
            # A line of the model's source, or a path, may hold invalid characters.
            (self._directory / name).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")


@contextlib.contextmanager
def timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def finished(report: Report) -> None:
    """Write a report again into its graph's directory, if it has one: it is complete once all is compiled."""
    if report.dumped is not None:
        Dumper(directory=Path(report.dumped), traced=False).report(report)


def graph_text(gm: fx.GraphModule) -> str:
    """Return the graph as code, nested graphs included: each value with its dtype, shape and strides, under its source line."""
    code = gm.print_readable(print_output=False, include_stride=True, expanded_def=True)
    return _DROPPED_VALUES.sub("", code).strip()


def code_of(graph: fx.Graph) -> str:
    """Return `graph_text` of a graph without a module: nested graphs are only named."""
    code = graph.python_code("self", verbose=True, include_stride=True, expanded_def=True).src
    return _DROPPED_VALUES.sub("", code).strip()


def op_counts(gm: fx.GraphModule) -> Counter[str]:
    """Count the calls of each op, in the graph and the graphs nested in it."""
    counts: Counter[str] = Counter()
    for module in torch_compat.graph_modules(gm):
        counts.update(_op_name(module, node) for node in module.graph.nodes if node.op.startswith("call_"))
    return counts


def op_diff(before: Counter[str], after: Counter[str]) -> str:
    """Return one line an op whose count changed, the largest change first: "matmul: 12 -> 8 (-4)"."""
    changes = {op: after[op] - before[op] for op in before | after if after[op] != before[op]}
    if not changes:
        return f"ops: {before.total()}, none added or removed"
    lines = [f"ops: {before.total()} -> {after.total()} ({after.total() - before.total():+d})"]
    for op, change in sorted(changes.items(), key=lambda item: (-abs(item[1]), item[0])):
        lines.append(f"  {op}: {before[op]} -> {after[op]} ({change:+d})")
    return "\n".join(lines)


def _op_name(module: fx.GraphModule, node: fx.Node) -> str:
    """Return an op's name; a method and the function of the same name count as one op."""
    target: Any = node.target
    if node.op == "call_method":
        return str(target)
    if node.op == "call_module":
        return type(module.get_submodule(target)).__name__
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return str(getattr(target, "__name__", target))


def _text_diff(before: str, after: str) -> str:
    if before == after:
        return "the graph's text is the same"
    return "\n".join(difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", lineterm=""))


def _new_directory(dump_dir: str, name: str) -> Path:
    """Make and return a directory of that name, or name-2 and so on.

    Raises OSError, but also RuntimeError for a path with an unknown user, and ValueError for an invalid one (a zero byte, a lone
    surrogate).
    """
    parent = Path(dump_dir).expanduser() / _rank_name()
    parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, 10_000):
        directory = parent / (name if attempt == 1 else f"{name}-{attempt}")
        # mkdir is atomic, so two processes never share a directory.
        with contextlib.suppress(FileExistsError):
            directory.mkdir()
            return directory
    raise FileExistsError(f"{parent} holds too many dumps of {name}")


def _rank_name() -> str:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return ""
    return f"rank{distributed.get_rank()}"


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name).strip("_.") or "graph"
