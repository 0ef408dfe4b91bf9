"""The text of a function and of all that it reads: a digest that is the same in every process, and why a function may not be taken.

The text is that of the file, and is held against the code that runs. What a function reads besides its arguments is followed: functions,
attributes of modules, numbers, defaults. All of it is in the digest, and every place is noted, for guards. What can't be followed refuses.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import hashlib
import inspect
import io
import sys
import textwrap
import tokenize
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from attn_compiler.passes.matching.linear import branches, vocabulary
from attn_compiler.torch_private.outside_reads import OutsideRead

_SPACE = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)
#: what changes with a tab, and with a version of Python
_LAYOUT = {tokenize.INDENT: "indent", tokenize.DEDENT: "dedent", tokenize.NEWLINE: "newline"}
#: names that say what they are, so that a digest need not
_USUAL = {"torch": torch, "F": F, "nn": torch.nn}
#: decorators around a function that are looked behind
_MOST_WRAPPED = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """digest: of all that is read. why_not: why the function may not be taken; None where nothing speaks against it. reads: every place."""

    digest: str
    why_not: str | None = None
    reads: tuple[OutsideRead, ...] = ()

    def holds(self) -> bool:
        """Whether all that was read still is there."""
        return all(one.holds() for one in self.reads)


def read(function: types.FunctionType) -> Source:
    """A function with all that it reads."""
    reader = _Reader()
    why = reader.add(function, _place(function))
    held = hashlib.sha256("\n".join((*reader.texts.values(), *reader.names)).encode()).hexdigest()[:16]
    return Source(
        digest=held, why_not=why, reads=tuple({(one.module, one.names, one.key): one for one in reader.reads}.values())
    )


def innermost(value: object) -> Iterator[tuple[types.FunctionType, int]]:
    """The function behind decorators, with their number; nothing of what is no function, or wraps itself."""
    for wrapped in range(_MOST_WRAPPED):
        if not isinstance(value, types.FunctionType):
            return
        if "__wrapped__" not in vars(value):
            yield value, wrapped
            return
        value = vars(value)["__wrapped__"]


def _place(function: types.FunctionType) -> OutsideRead | None:
    """Where a function stands in its module, maybe behind decorators."""
    module = sys.modules.get(function.__module__)
    for name, value in vars(module).items() if module is not None else ():
        for found, wrapped in innermost(value):
            if found is function:
                return OutsideRead(
                    module=function.__module__, names=(name, *("__wrapped__",) * wrapped), value=function
                )
    return None


class _Reader:
    """What was read so far. texts: of functions. names: what names stand for, where their text does not say it."""

    def __init__(self) -> None:
        self.texts: dict[types.FunctionType, str] = {}
        self.names: list[str] = []
        self.reads: list[OutsideRead] = []

    def add(self, function: types.FunctionType, place: OutsideRead | None) -> str | None:
        """OutsideRead a function. Gives why it may not be taken."""
        if function in self.texts:
            return None
        self.texts[function] = ""
        name = function.__name__
        if function.__closure__:
            return f"{name} has variables of another function"
        module = sys.modules.get(function.__module__)
        if place is None or module is None or vars(module) is not function.__globals__:
            return f"{name} is in no loaded module by its name"
        self.reads += (place, *_made_of(function, place))
        found = _tree(function)
        if found is None:
            return f"the text of {name} is not at hand"
        tree, text = found
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self.texts[function] = f"{_tokens(text)} {[repr(value) for value in defaults]}"
        unknown = next((value for value in defaults if not vocabulary.is_constant(value)), None)
        why = f"a default of it is {unknown!r:.40}, which may change" if unknown is not None else branches.why_not(tree)
        return f"{name}: {why}" if why is not None else self._globals(function, tree)

    def _globals(self, function: types.FunctionType, tree: ast.FunctionDef) -> str | None:
        outside = frozenset(_globals(function.__code__))
        own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        both = sorted(own & outside)
        if both:
            return f"{function.__name__}: {both[0]} is a variable of its own and one of its module"
        found = list(vocabulary.chains(tree, outside))
        unknown = next((one for one in found if isinstance(one, str)), None)
        if unknown is not None:
            return f"{function.__name__}: {unknown}"
        for chain in sorted({one for one in found if isinstance(one, tuple)}):
            why = self._followed(function, chain)
            if why is not None:
                return why
        return None

    def _followed(self, function: types.FunctionType, chain: vocabulary.Chain) -> str | None:
        """Why what stands under a name may not be read."""
        spelled, last = ".".join(chain), chain[-1]
        scope = function.__globals__
        if chain[0] not in scope:
            is_known = vocabulary.is_known(vars(builtins).get(spelled), spelled)
            return None if is_known else f"{function.__name__} calls {spelled}, of which nothing is known"
        place = OutsideRead(module=function.__module__, names=chain[:1], value=scope[chain[0]])
        for name in chain[1:]:
            self.reads.append(place)
            if type(place.value) is not types.ModuleType or name not in vars(place.value):
                return f"{function.__name__} reads {spelled}, and only attributes of modules are followed"
            place = replace(place, names=(*place.names, name), value=vars(place.value)[name])
        self.reads.append(place)
        value = place.value
        if last in branches.FALSE_HERE:
            is_theirs = getattr(value, "__module__", "").partition(".")[0] == "transformers"
            return None if is_theirs else f"{last} is another function than transformers'"
        if vocabulary.is_known(value, last):
            usual = _USUAL.get(chain[0])
            if usual is None or scope[chain[0]] is not usual:
                self.names.append(f"{spelled} is {getattr(value, '__module__', '')}.{getattr(value, '__name__', last)}")
            return None
        if isinstance(value, types.FunctionType) and value.__module__.partition(".")[0] != torch.__name__:
            known = list(self.texts)
            if last != value.__name__ or any(one.__name__ == last and one is not value for one in known):
                self.names.append(f"{spelled} is {known.index(value) if value in known else len(known)}")
            return self.add(value, place)
        if not vocabulary.is_constant(value):
            return f"{function.__name__} reads {spelled}, which may change"
        if _USUAL.get(chain[0]) is None:
            self.names.append(f"{spelled} = {value!r}")
        return None


def _made_of(function: types.FunctionType, place: OutsideRead) -> Iterator[OutsideRead]:
    """What of a function may be replaced while it stays the same object."""
    for name in ("__code__", "__defaults__"):
        yield replace(place, names=(*place.names, name), value=getattr(function, name))
    by_name = function.__kwdefaults__
    at = replace(place, names=(*place.names, "__kwdefaults__"), value=by_name)
    yield at
    for key, value in (by_name or {}).items():
        yield replace(at, key=key, value=value)


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
