"""Text of a function and of all that it reads: a digest that is equal in every process, and the reason against taking it.

The text comes from the file, and is compared with the code that runs. Everything that a function reads besides its arguments is followed:
functions, attributes of modules, numbers, defaults. All of it enters the digest, and every place is noted for guards. A read that can't be
followed is a refusal.
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
from attn_compiler.passes.matching.linear.looking import innermost
from attn_compiler.torch_private.substitution import OutsideRead

_SPACE = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)
#: tokens whose text depends on tabs and on the Python version
_LAYOUT = {tokenize.INDENT: "indent", tokenize.DEDENT: "dedent", tokenize.NEWLINE: "newline"}
#: modules under their usual names, which a digest need not record
_USUAL = {"torch": torch, "F": F, "nn": torch.nn}


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """digest: of all that is read. why_not: the reason against taking the function; None if there is none. reads: every place read."""

    digest: str
    why_not: str | None = None
    reads: tuple[OutsideRead, ...] = ()

    def holds(self) -> bool:
        """Return whether everything read is still in place."""
        return all(one.holds() for one in self.reads)


def read(function: types.FunctionType) -> Source:
    """Read a function with all that it reads."""
    reader = _Reader()
    why = reader.add(function, _place(function))
    held = hashlib.sha256("\n".join((*reader.texts.values(), *reader.names)).encode()).hexdigest()[:16]
    return Source(
        digest=held, why_not=why, reads=tuple({(one.module, one.names, one.key): one for one in reader.reads}.values())
    )


def _place(function: types.FunctionType) -> OutsideRead | None:
    """Find the place of a function in its module, maybe behind decorators."""
    module = sys.modules.get(function.__module__)
    for name, value in vars(module).items() if module is not None else ():
        for found, wrapped in innermost(value):
            if found is function:
                return OutsideRead(
                    module=function.__module__, names=(name, *("__wrapped__",) * wrapped), value=function
                )
    return None


class _Reader:
    """Everything read so far. texts: of functions. names: meanings of names that their text does not tell."""

    def __init__(self) -> None:
        self.texts: dict[types.FunctionType, str] = {}
        self.names: list[str] = []
        self.reads: list[OutsideRead] = []

    def add(self, function: types.FunctionType, place: OutsideRead | None) -> str | None:
        """Read a function from its place. Return the reason against taking it, or None."""
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
        """Return why the object behind a name may not be read; None if it may."""
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
    """Yield the parts of a function that can be replaced while the object stays the same."""
    for name in ("__code__", "__defaults__"):
        yield replace(place, names=(*place.names, name), value=getattr(function, name))
    by_name = function.__kwdefaults__
    at = replace(place, names=(*place.names, "__kwdefaults__"), value=by_name)
    yield at
    for key, value in (by_name or {}).items():
        yield replace(at, key=key, value=value)


def _tree(function: types.FunctionType) -> tuple[ast.FunctionDef, str] | None:
    """Return the function's definition in its file, and its text; None if other code runs now."""
    try:
        lines, _ = inspect.findsource(function.__code__)
        text = textwrap.dedent(inspect.getsource(function.__code__))
        found = ast.parse(text).body[0]
        is_it = any(_same(code, function.__code__) for code in _codes("".join(lines)))
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    return (found, _own_text(found, text)) if isinstance(found, ast.FunctionDef) and is_it else None


def _own_text(found: ast.FunctionDef, text: str) -> str:
    """Remove the decorators, whose lines come before the function's, and the docstring."""
    lines = text.splitlines(keepends=True)
    first = found.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        lines[first.lineno - 1 : first.end_lineno] = []
    return "".join(lines[found.lineno - 1 :])


@functools.lru_cache(maxsize=16)
def _codes(text: str) -> tuple[types.CodeType, ...]:
    """Compile the top-level functions of a file. The file's imports decide how attributes of their names are called."""
    module = compile(text, "<text>", "exec", dont_inherit=True)
    return tuple(code for code in module.co_consts if isinstance(code, types.CodeType))


def _same(one: types.CodeType, other: types.CodeType) -> bool:
    """Return whether two code objects do the same: equal names, numbers and operations, wherever their lines are."""
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


#: compiler flag of `from __future__ import annotations`, which changes no operation
_FUTURE = 0x1000000


def _globals(code: types.CodeType) -> set[str]:
    """Return every global name that is read. Attribute names are included, which does no harm unless a global has such a name."""
    found = {str(one.argval) for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return found.union(*(_globals(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


def _tokens(text: str) -> str:
    """Return the text without comments and blanks."""
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return " ".join(_LAYOUT.get(one.type, one.string) for one in found if one.type not in _SPACE)
