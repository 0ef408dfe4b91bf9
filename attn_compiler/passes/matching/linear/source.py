"""The text of a function and of those that it calls: a digest that is the same in every process, and why a function may not be taken.

The text is that of the file, and is held against the code that runs. So a digest says what a function computes, as far as it says it:
what it reads besides its arguments may only be modules, types and functions, whose texts are in the digest.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import hashlib
import inspect
import io
import textwrap
import tokenize
import types
from dataclasses import dataclass

from attn_compiler.passes.matching.linear import branches

_SPACE = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)
#: what changes with a tab, and with a version of Python
_LAYOUT = {tokenize.INDENT: "indent", tokenize.DEDENT: "dedent", tokenize.NEWLINE: "newline"}
_FIXED = (types.ModuleType, types.BuiltinFunctionType, type)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """digest: of the text. why_not: why the function may not be taken; None where nothing speaks against it."""

    digest: str
    why_not: str | None = None


def read(function: types.FunctionType) -> Source:
    """A function with all that it calls by name."""
    texts: dict[types.FunctionType, str] = {}
    why = _add(function, texts)
    held = hashlib.sha256("\n".join(texts.values()).encode()).hexdigest()[:16]
    return Source(digest=held, why_not=why)


def _add(function: types.FunctionType, texts: dict[types.FunctionType, str]) -> str | None:
    if function in texts:
        return None
    texts[function] = ""
    if function.__closure__:
        return f"{function.__name__} has variables of another function"
    tree = _tree(function)
    if tree is None:
        return f"the text of {function.__name__} is not at hand"
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    texts[function] = f"{_tokens(tree[1])} {[repr(value) for value in defaults]}"
    why = branches.why_not(tree[0])
    if why is not None:
        return f"{function.__name__}: {why}"
    for name in sorted(_globals(function.__code__)):
        value = function.__globals__.get(name, getattr(builtins, name, None))
        if isinstance(value, _FIXED):
            continue
        if not isinstance(value, types.FunctionType):
            return f"{function.__name__} reads {name}, which may change"
        if name in branches.FALSE_HERE and value.__module__.partition(".")[0] == "transformers":
            continue
        why = f"{name} is another function than transformers'" if name in branches.FALSE_HERE else _add(value, texts)
        if why is not None:
            return why
    return None


def _tree(function: types.FunctionType) -> tuple[ast.FunctionDef, str] | None:
    """The function in its file, and its text, if that still is what runs."""
    try:
        lines, _ = inspect.findsource(function.__code__)
        text = textwrap.dedent(inspect.getsource(function.__code__))
        found = ast.parse(text).body[0]
        is_it = any(_same(code, function.__code__) for code in _codes("".join(lines)))
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    return (found, _own_text(found, text)) if isinstance(found, ast.FunctionDef) and is_it else None


def _own_text(found: ast.FunctionDef, text: str) -> str:
    """Without decorators, whose lines come before the function's, and without the docstring."""
    lines = text.splitlines(keepends=True)
    first = found.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        lines[first.lineno - 1 : first.end_lineno] = []
    return "".join(lines[found.lineno - 1 :])


@functools.lru_cache(maxsize=16)
def _codes(text: str) -> tuple[types.CodeType, ...]:
    """The functions at the top of a file. They are compiled among its imports, which decide how a name's attribute is called."""
    module = compile(text, "<text>", "exec", dont_inherit=True)
    return tuple(code for code in module.co_consts if isinstance(code, types.CodeType))


def _same(one: types.CodeType, other: types.CodeType) -> bool:
    """Whether two codes do the same: names, numbers and operations, wherever their lines are."""
    if (one.co_code, one.co_names, one.co_varnames, one.co_flags & ~_FUTURE) != (
        other.co_code,
        other.co_names,
        other.co_varnames,
        other.co_flags & ~_FUTURE,
    ):
        return False
    if len(one.co_consts) != len(other.co_consts):
        return False
    return all(
        _same(a, b)
        if isinstance(a, types.CodeType) and isinstance(b, types.CodeType)
        else type(a) is type(b) and repr(a) == repr(b)
        for a, b in zip(one.co_consts, other.co_consts, strict=True)
    )


#: `from __future__ import annotations` of the module, which changes no operation
_FUTURE = 0x1000000


def _globals(code: types.CodeType) -> set[str]:
    """Every global name that is read: attributes are among them, which does no harm where no global has such a name."""
    found = {str(one.argval) for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return found.union(*(_globals(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


def _tokens(text: str) -> str:
    """Without comments and blanks."""
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return " ".join(_LAYOUT.get(one.type, one.string) for one in found if one.type not in _SPACE)
