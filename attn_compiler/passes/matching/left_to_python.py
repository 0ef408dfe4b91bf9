"""Attention outside of any graph because Dynamo leaves it to Python, found by the graph breaks.

A break inside a checkpoint leaves the whole checkpoint to Python: a layer or a whole tower. Elsewhere Dynamo compiles the code before and
after a break. Python then runs three things: functions excluded from tracing, functions not written in Python, and the code from a `with`
on that Dynamo can't enter.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
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
from attn_compiler.torch_private.frames import STORING_ONCE
from attn_compiler.torch_private.observe import Break

_RULE = "Dynamo traces the attention"
_CHECKPOINT = re.compile(r"checkpoint\w*\(", re.IGNORECASE)
_CALLED = re.compile(r"([\w.]+)\(")
_SAYS_ATTENTION = re.compile(r"(?!.*mask).*(?:attention|attn|sdpa)", re.IGNORECASE)
#: generic names of functions, which do not tell their work
_OF_ANYTHING = frozenset({"forward", "__call__", "apply", "fwd"})
_MODULE_SAYS_ATTENTION = re.compile(r"Attention|Attn")
#: Dynamo's words for a function excluded from tracing, and for a C function
_DISABLED = re.compile(r"torch\.compiler\.disable.*?<function (?P<name>\S+) at", re.DOTALL)
_OF_C = re.compile(r"marked as skipped.*?module: (?P<module>[\w.]+), qualname: (?P<name>[\w.]+)", re.DOTALL)
#: first words of Dynamo's message for a `with` that it can't enter, and for a break there without a message
_NO_WITH = ("Unsupported context manager", "step_unsupported")
#: functions not written in Python: Dynamo compiles nothing inside a call of one from Python
_NOT_PYTHONS = frozenset({"scaled_dot_product_attention", "softmax"})


def find(found: Break) -> MissReport | None:
    """Return the attention that a break leaves to Python, as a miss; None if there is none.

    The call must be in the compiled frame. Dynamo compiles a deeper frame next, and breaks there again.
    """
    if not found.stack:
        return None
    call, *inside = found.stack
    if _CHECKPOINT.search(call.line or ""):
        return _in_checkpoint(found, call, inside)
    return None if inside else _not_traced(found, call) or _not_entered(found, call)


def _in_checkpoint(
    found: Break, call: traceback.FrameSummary, inside: Sequence[traceback.FrameSummary]
) -> MissReport | None:
    owners = next(filter(None, (_owners(found, frame) for frame in inside)), None)
    paths = [path for name, module in owners or _given(found) for path in _attentions(name, module)]
    if not paths and not any(map(_calls_attention, inside)):
        return None
    remedy = (
        f"set torch._dynamo.config.{STORING_ONCE} = True before the first call, if the backward need not store the values again "
        "(attn_compiler.integrations.transformers.compile_model does so for layers that share keys and values)"
        if STORING_ONCE in found.reason
        else None
    )
    kinds = sorted({type(module).__name__ for _, module in owners or ()}) or ["what it runs"]
    reason = Reason(
        code=Code.LEFT_TO_PYTHON,
        rule=_RULE,
        observed=f"a graph break at {_place(found.stack[-1])} inside of a checkpoint leaves {', '.join(kinds)} to Python: "
        f"{_first_line(found.reason)}",
        remedy=remedy,
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
            remedy=f"call {name} without torch.compiler.disable",
        )
    elif of_c is not None:
        name = f"{of_c['module']}::{of_c['name']}"
        reason = opaque_calls.reason(name)
    else:
        return None
    if not _says_attention(name) and not (_last(name) in _OF_ANYTHING and _calls_attention(call)):
        return None
    return _row([path for path, _ in _owners(found, call)], name, call, call, reason)


def _not_entered(found: Break, call: traceback.FrameSummary) -> MissReport | None:
    """Report the attention that a `with` leaves to Python: inside it, or after it in the same function."""
    scope, called = _with_at(call) if found.reason.startswith(_NO_WITH) else ("", frozenset[str]())
    if not called & _NOT_PYTHONS:
        return None
    old = "sdp_kernel" in scope and "sdpa_kernel" not in scope
    reason = Reason(
        code=Code.LEFT_TO_PYTHON,
        rule=_RULE,
        observed=f"Dynamo can't enter `with {scope}`, and leaves the rest of the function to Python",
        remedy="remove this `with`, or use torch.nn.attention.sdpa_kernel, which Dynamo can enter"
        if old
        else "enter this `with` around the call of the compiled model, or remove it",
    )
    return _row([path for path, _ in _owners(found, call)], "with", call, call, reason)


def _with_at(frame: traceback.FrameSummary) -> tuple[str, frozenset[str]]:
    """Return the context manager of the innermost `with` at a line, and the names that its function calls from there on."""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.filename)))
    except SyntaxError:  # A notebook cell may hold a command that is not Python.
        tree = ast.parse("")
    functions = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef) and x.name == frame.name]
    line = frame.lineno or 0
    for function in functions:
        inside = list(ast.walk(function))
        heads = [x for x in inside if isinstance(x, ast.With) and x.lineno <= line <= x.body[0].lineno]
        if heads:
            block = max(heads, key=lambda x: x.lineno)
            calls = [x.func for x in inside if isinstance(x, ast.Call) and x.lineno >= block.lineno]
            return ast.unparse(block.items[0].context_expr), frozenset(_last(ast.unparse(func)) for func in calls)
    return "", frozenset()


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
    """Return whether the model's line, or the function around it, calls something named as an attention."""
    return any(map(_says_attention, (frame.name, *_CALLED.findall(frame.line or ""))))


def _says_attention(name: str) -> bool:
    """Judge a name by its last part, or by the owner if the last part is generic. An attention's cache is not an attention."""
    last = _last(name)
    return _SAYS_ATTENTION.match(name if last in _OF_ANYTHING else last) is not None


def _last(name: str) -> str:
    return re.split(r"\.|::", name)[-1]


def _owners(found: Break, frame: traceback.FrameSummary) -> list[tuple[str, nn.Module]]:
    """Return the modules whose forward the frame may run, with paths from the compiled module or modules."""
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
    """Yield the paths of the outermost modules whose class is named as an attention."""
    if _MODULE_SAYS_ATTENTION.search(type(module).__name__):
        yield _path(name, "")
        return
    for part, child in module.named_children():
        yield from _attentions(_path(name, part), child)


def _given(found: Break) -> list[tuple[str, nn.Module]]:
    """Return the compiled modules by name; a single one is the root."""
    given = list(found.modules.items())
    return given if len(given) > 1 else [("", module) for _, module in given]


def _path(*parts: str) -> str:
    return ".".join(filter(None, parts))
