"""The search of loaded modules for functions that have the parameters of a template: all that most processes need of linear attention."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

from attn_compiler.passes.matching.linear.templates import TEMPLATES, Template

#: packages without models
_NO_MODELS = frozenset({"torch", "numpy", "scipy", "sympy", "triton", "attn_compiler", "networkx", "pytest", "_pytest"})
#: most decorators around a function that are unwrapped
_MOST_WRAPPED = 16

#: names of modules already searched
_SEEN: set[str] = set()
_PARAMETERS = tuple((one, one.parameters) for one in TEMPLATES)
_FEWEST = min(len(parameters) for _, parameters in _PARAMETERS)


def new_functions() -> Iterator[types.FunctionType]:
    """Yield the functions that fit a template, of modules loaded since the last search."""
    for name, module in list(sys.modules.items()):
        if name in _SEEN or not isinstance(module, types.ModuleType):
            continue
        _SEEN.add(name)
        root, _, rest = name.partition(".")
        if root in _NO_MODELS or root in sys.stdlib_module_names or (root == "transformers" and "modeling" not in rest):
            continue
        # Most values of a module are no functions, and most functions have fewer parameters than a template.
        for value in [one for one in list(vars(module).values()) if type(one) is types.FunctionType]:
            for found, _ in innermost(value):
                if found.__module__ == name and template_of(found) is not None:
                    yield found


def innermost(value: object) -> Iterator[tuple[types.FunctionType, int]]:
    """Yield the function behind decorators, with their number; nothing if it is no function or wraps itself."""
    for wrapped in range(_MOST_WRAPPED):
        if not isinstance(value, types.FunctionType):
            return
        if "__wrapped__" not in vars(value):
            yield value, wrapped
            return
        value = vars(value)["__wrapped__"]


def template_of(function: types.FunctionType) -> Template | None:
    """Return the first template whose parameters a function has."""
    code = function.__code__
    count = code.co_argcount + code.co_kwonlyargcount
    if count < _FEWEST:
        return None
    names = set(code.co_varnames[:count])
    return next((one for one, parameters in _PARAMETERS if parameters <= names), None)
