"""Attention that Dynamo leaves to Python, so that it is in no graph: told by where Dynamo breaks.

A break inside of a checkpoint leaves all that the checkpoint runs to Python, a layer or a whole tower. Elsewhere Dynamo compiles what is
before and after a break, and a function alone is left that it is told not to trace, or that is none of Python's.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import traceback
from collections.abc import Iterator, Sequence
from types import CodeType

from torch import nn

from attn_compiler.passes.graph import opaque_calls
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.reporting.facts import MissReport
from attn_compiler.torch_private.observe import Break

_RULE = "Dynamo traces the attention"
_CHECKPOINT = re.compile(r"checkpoint\w*\(", re.IGNORECASE)
_CALLED = re.compile(r"([\w.]+)\(")
_SAYS_ATTENTION = re.compile(r"(?!.*mask).*(?:attention|attn|sdpa)", re.IGNORECASE)
#: functions that are named for no work
_OF_ANYTHING = frozenset({"forward", "__call__", "apply", "fwd"})
_MODULE_SAYS_ATTENTION = re.compile(r"Attention|Attn")
#: what Dynamo calls a function that it was told not to trace, and one of C's
_DISABLED = re.compile(r"torch\.compiler\.disable.*?<function (?P<name>\S+) at", re.DOTALL)
_OF_C = re.compile(r"marked as skipped.*?module: (?P<module>[\w.]+), qualname: (?P<name>[\w.]+)", re.DOTALL)


def find(found: Break) -> MissReport | None:
    """The attention that a break leaves to Python, as a miss; None where it leaves none.

    The call has to be in the frame that was compiled: of one further in Dynamo compiles the frame next, and breaks there again.
    """
    if not found.stack:
        return None
    call, *inside = found.stack
    if _CHECKPOINT.search(call.line or ""):
        return _in_checkpoint(found, call, inside)
    return None if inside else _not_traced(found, call)


def _in_checkpoint(
    found: Break, call: traceback.FrameSummary, inside: Sequence[traceback.FrameSummary]
) -> MissReport | None:
    owners = next(filter(None, (_owners(found, frame) for frame in inside)), None)
    paths = [path for name, module in owners or _given(found) for path in _attentions(name, module)]
    if not paths and not any(map(_calls_attention, inside)):
        return None
    kinds = sorted({type(module).__name__ for _, module in owners or ()}) or ["what it runs"]
    reason = Reason(
        code=Code.LEFT_TO_PYTHON,
        rule=_RULE,
        observed=f"a graph break at {_place(found.stack[-1])} inside of a checkpoint leaves {', '.join(kinds)} to Python: "
        f"{_first_line(found.reason)}",
        remedy="compute these layers without gradient checkpointing, or mend the break: outside of a checkpoint Dynamo compiles "
        "what is before and after it",
    )
    return _row(paths, "checkpoint", found.stack[-1], call, reason)


def _not_traced(found: Break, call: traceback.FrameSummary) -> MissReport | None:
    disabled, of_c = _DISABLED.search(found.reason), _OF_C.search(found.reason)
    if disabled is not None:
        name = disabled["name"]
        reason = Reason(
            code=Code.LEFT_TO_PYTHON,
            rule=_RULE,
            observed=f"torch.compiler.disable keeps {name} from being traced",
            remedy="call it without torch.compiler.disable",
        )
    elif of_c is not None:
        name = f"{of_c['module']}::{of_c['name']}"
        reason = opaque_calls.reason(name)
    else:
        return None
    if not _says_attention(name) and not (_last(name) in _OF_ANYTHING and _calls_attention(call)):
        return None
    return _row([path for path, _ in _owners(found, call)], name, call, call, reason)


def _row(
    modules: Sequence[str], anchor: str, at: traceback.FrameSummary, call: traceback.FrameSummary, reason: Reason
) -> MissReport:
    return MissReport(
        modules=tuple(path or "(root)" for path in modules) or ("(no module)",),
        anchor=anchor,
        nearest="none tried",
        stopped_at=_place(at),
        reason=reason,
        source=_place(call),
    )


def _place(frame: traceback.FrameSummary) -> str:
    return f"{os.path.basename(frame.filename)}:{frame.lineno}"


def _first_line(reason: str) -> str:
    return reason.strip().partition("\n")[0]


def _calls_attention(frame: traceback.FrameSummary) -> bool:
    """Whether a line of the model's, or the function that it is in, names an attention that is called."""
    return any(map(_says_attention, (frame.name, *_CALLED.findall(frame.line or ""))))


def _says_attention(name: str) -> bool:
    """By its last part, or, where that tells nothing, by what it belongs to: a cache of an attention is none."""
    last = _last(name)
    return _SAYS_ATTENTION.match(name if last in _OF_ANYTHING else last) is not None


def _last(name: str) -> str:
    return re.split(r"\.|::", name)[-1]


def _owners(found: Break, frame: traceback.FrameSummary) -> list[tuple[str, nn.Module]]:
    """The modules whose forward the frame may run, by their paths from what was compiled."""
    every = ((_path(name, path), one) for name, given in _given(found) for path, one in given.named_modules())
    return [(path, one) for path, one in every if _is_line_of(type(one), frame)]


def _is_line_of(cls: type[nn.Module], frame: traceback.FrameSummary) -> bool:
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return code is not None and code.co_filename == frame.filename and frame.lineno in _lines(code)


@functools.cache
def _lines(code: CodeType) -> range:
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return range(code.co_firstlineno, max(lines, default=code.co_firstlineno) + 1)


def _attentions(name: str, module: nn.Module) -> Iterator[str]:
    """Paths of the outermost modules that their classes call an attention."""
    if _MODULE_SAYS_ATTENTION.search(type(module).__name__):
        yield _path(name, "")
        return
    for part, child in module.named_children():
        yield from _attentions(_path(name, part), child)


def _given(found: Break) -> list[tuple[str, nn.Module]]:
    """The modules that were given, by name; one alone is the root."""
    given = list(found.modules.items())
    return given if len(given) > 1 else [("", module) for _, module in given]


def _path(*parts: str) -> str:
    return ".".join(filter(None, parts))
