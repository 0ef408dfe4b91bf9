"""What tests name of the package's and of each other's, read from their source: tests that do not run here may name what has gone.

`wrong` looks at a module of tests and at every function of tests that it leads to. A name is followed from an import, an annotation or the
annotated result of a call. Where that ends (a name that is bound twice, a tensor, another package's module) nothing is said.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any
from unittest import mock

OURS = ("attn_compiler", "benchmarks", "tests")
#: packages that tests can do without
OPTIONAL = ("cudnn", "diffusers", "flash_attn", "transformers")


# ---- importing without the optional packages ------------------------------------------------------------------------------


class _StandIns:
    """Finds any module of a package that is not installed. It holds whatever it is asked for."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in OPTIONAL else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)


@contextmanager
def _standing_in() -> Iterator[None]:
    """A module that holds a stand-in is forgotten afterwards, as the stand-ins are."""
    kept, finder = set(sys.modules), _StandIns()
    sys.meta_path.append(finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for name in sys.modules.keys() - kept:
            held = (sys.modules[name], *vars(sys.modules[name]).values())
            if any(isinstance(one, (_StandIn, mock.NonCallableMock)) for one in held):
                package, _, last = name.rpartition(".")
                vars(sys.modules.get(package, sys.modules[name])).pop(last, None)
                del sys.modules[name]


def module(name: str) -> types.ModuleType:
    """A module of tests, also where a package that it needs is missing."""
    try:
        return importlib.import_module(name)
    except BaseException as error:
        # A test that is skipped is no Exception.
        if isinstance(error, KeyboardInterrupt) or all(find_spec(package) for package in OPTIONAL):
            raise
    with _standing_in():
        return importlib.import_module(name)


# ---- what is known of a value ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Known:
    """value: the object, or its class where only that is known."""

    value: Any
    is_class_of: bool = False

    @property
    def owner(self) -> Any:
        """What has the attributes."""
        return self.value if self.is_class_of or _is_named(self.value) else type(self.value)


def _is_named(value: Any) -> bool:
    return isinstance(value, (type, types.ModuleType, types.FunctionType))


def _is_ours(value: Any) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] in OURS


def _has(known: _Known, name: str) -> bool:
    """Of our modules, classes and instances; true of anything else, and where attributes are made up as they are asked for."""
    owner = known.owner
    if not _is_ours(owner) or hasattr(known.value, name) or hasattr(owner, "__getattr__"):
        return True
    if isinstance(owner, types.ModuleType):
        return hasattr(owner, "__path__") and find_spec(f"{owner.__name__}.{name}") is not None
    if not isinstance(owner, type):
        return False
    classes = [one for one in owner.__mro__ if one is not object]
    return not all(map(_is_ours, classes)) or any(name in _fields(one) for one in classes)


@functools.cache
def _fields(of: type) -> set[str]:
    """What instances have by the class's source: annotated, or written to."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(of)))
    except (OSError, TypeError):
        return set()
    stored = {x.attr for x in ast.walk(tree) if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store)}
    return stored | set(inspect.get_annotations(of))


def _instance(annotation: Any) -> _Known | None:
    """Of a class of ours; another one's attributes are its own matter."""
    return _Known(value=annotation, is_class_of=True) if isinstance(annotation, type) and _is_ours(annotation) else None


@functools.cache
def _hints(of: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(of)
    except (AttributeError, NameError, TypeError):
        return {}


def _attribute(known: _Known, name: str) -> _Known | None:
    if known.is_class_of:
        found = inspect.getattr_static(known.value, name, None)
        if isinstance(found, (property, functools.cached_property)):
            return _instance(_hints(found.fget if isinstance(found, property) else found.func).get("return"))
        if isinstance(found, types.FunctionType):
            return _Known(value=functools.partial(found, None))
        return _instance(_hints(known.value).get(name))
    if isinstance(known.value, mock.NonCallableMock) or not _is_ours(known.owner):
        return None
    try:
        return _Known(value=getattr(known.value, name))
    except Exception:  # noqa: BLE001 (whatever a property does)
        return None


# ---- what a function names -------------------------------------------------------------------------------------------------


class _Function:
    """One function of a module of tests. wrong: what it names and is not there. leads_to: functions and classes of tests."""

    def __init__(self, node: ast.FunctionDef, home: types.ModuleType, owner: type | None) -> None:
        self._home, self._owner, self._first = home, owner, node.args.args[:1]
        self._bound: dict[str, list[Callable[[], _Known | None]]] = {}
        self.wrong: list[str] = []
        self.leads_to: list[Any] = []
        inside = list(ast.walk(node))[1:]
        for inner in inside:
            self._bind(inner)
        for inner in inside:
            self._look(inner)

    def _bind(self, node: ast.AST) -> None:
        """Notes what a name is bound to, if that can be told, for each time that it is."""
        match node:
            case ast.arg():
                owner = self._owner if node in self._first else None
                self._note(node.arg, lambda: self._annotated(node.annotation) if owner is None else _instance(owner))
            case ast.Assign(targets=[ast.Name(id=name)]):
                self._note(name, lambda: self._value(node.value))
            case ast.AnnAssign(target=ast.Name(id=name)):
                self._note(name, lambda: self._annotated(node.annotation))
            case ast.Tuple(ctx=ast.Store()) | ast.List(ctx=ast.Store()):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Name):
                        self._note(inner.id)
            case ast.For(target=ast.Name(id=name)) | ast.comprehension(target=ast.Name(id=name)):
                self._note(name)
            case ast.withitem(optional_vars=ast.Name(id=name)) | ast.NamedExpr(target=ast.Name(id=name)):
                self._note(name)
            case ast.AugAssign(target=ast.Name(id=name)) | ast.ExceptHandler(name=str(name)):
                self._note(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                self._note(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                for alias in aliases:
                    self._note((alias.asname or alias.name).partition(".")[0])

    def _note(self, name: str, bound: Callable[[], _Known | None] = lambda: None) -> None:
        self._bound.setdefault(name, []).append(bound)

    def _annotated(self, annotation: ast.expr | None) -> _Known | None:
        known = None if annotation is None else self._value(annotation)
        return None if known is None or known.is_class_of else _instance(known.value)

    def _value(self, node: ast.expr) -> _Known | None:
        if isinstance(node, ast.Name):
            if node.id in self._bound:
                found = self._bound[node.id]
                # An assignment may ask for itself: x = f(x).
                self._bound[node.id] = []
                known = found[0]() if len(found) == 1 else None
                self._bound[node.id] = found
                return known
            return _Known(value=vars(self._home)[node.id]) if node.id in vars(self._home) else None
        if isinstance(node, ast.Attribute):
            known = self._value(node.value)
            return None if known is None else _attribute(known, node.attr)
        if isinstance(node, ast.Call):
            called = self._value(node.func)
            return None if called is None or called.is_class_of else _result(called.value)
        return None

    def _look(self, node: ast.AST) -> None:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            self._look_for(node.value, node.attr, node.lineno)
        elif isinstance(node, ast.Call):
            self._look_at_call(node)
        if isinstance(node, (ast.Name, ast.Attribute)):
            known = self._value(node)
            if known is not None and not known.is_class_of:
                self.leads_to.append(known.value)

    def _look_for(self, base: ast.expr, name: str, line: int) -> None:
        known = self._value(base)
        if known is not None and not _has(known, name):
            self.wrong.append(f"{self._home.__name__}:{line}: {ast.unparse(base)} has no {name}")

    def _look_at_call(self, node: ast.Call) -> None:
        is_patch = isinstance(node.func, ast.Attribute) and node.func.attr in ("setattr", "object")
        if is_patch and len(node.args) > 2 and not any(word.arg == "raising" for word in node.keywords):
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                self._look_for(node.args[0], name.value, node.lineno)
        called = self._value(node.func)
        if called is None or called.is_class_of:
            return
        signature = _signature(called.value)
        is_open = any(isinstance(x, ast.Starred) for x in node.args) or any(word.arg is None for word in node.keywords)
        if signature is None:
            return
        try:
            named = {word.arg: None for word in node.keywords if word.arg is not None}
            given = () if is_open else (None,) * len(node.args)
            (signature.bind_partial if is_open else signature.bind)(*given, **named)
        except TypeError as error:
            self.wrong.append(f"{self._home.__name__}:{node.lineno}: {ast.unparse(node.func)}: {error}")


def _result(called: Any) -> _Known | None:
    if isinstance(called, type):
        return _instance(called)
    inner = called.func if isinstance(called, functools.partial) else inspect.unwrap(called)
    return _instance(_hints(inner).get("return")) if isinstance(inner, types.FunctionType) and _is_ours(inner) else None


def _signature(called: Any) -> inspect.Signature | None:
    """Of a function or class of ours."""
    inner = called.func if isinstance(called, functools.partial) else called
    if isinstance(inner, mock.NonCallableMock) or not _is_ours(inner):
        return None
    if not isinstance(inner, (type, types.FunctionType, types.MethodType, functools._lru_cache_wrapper)):
        return None
    try:
        return inspect.signature(called)
    except (TypeError, ValueError):
        return None


# ---- a module and what it leads to -----------------------------------------------------------------------------------------


def wrong(*modules: types.ModuleType) -> list[str]:
    """What functions of these modules, and those of tests that they lead to, name and is not there; arguments that do not fit, too."""
    found, seen = list[str](), set[tuple[str, str]]()
    left: list[tuple[types.ModuleType, str]] = [
        (home, node.name)
        for home in modules
        for node in _tree(home).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    ]
    while left:
        home, name = left.pop()
        if (home.__name__, name) in seen:
            continue
        seen.add((home.__name__, name))
        for function in _functions(home, name):
            found += function.wrong
            left += [place for one in function.leads_to for place in _places(one)]
    return sorted(set(found))


@functools.cache
def _tree(home: types.ModuleType) -> ast.Module:
    return ast.parse(inspect.getsource(home))


def _functions(home: types.ModuleType, name: str) -> Iterator[_Function]:
    for node in _tree(home).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            yield _Function(node, home, None)
        elif isinstance(node, ast.ClassDef) and node.name == name:
            owner = vars(home).get(name)
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and isinstance(owner, type):
                    is_method = not any(ast.unparse(x) in ("staticmethod", "classmethod") for x in inner.decorator_list)
                    yield _Function(inner, home, owner if is_method else None)


def _places(one: Any) -> Iterator[tuple[types.ModuleType, str]]:
    """Where a function or class of tests stands."""
    inner = one.func if isinstance(one, functools.partial) else inspect.unwrap(one) if callable(one) else one
    if not isinstance(inner, (type, types.FunctionType)) or not str(inner.__module__).startswith(
        ("tests.", "benchmarks.")
    ):
        return
    home = sys.modules.get(inner.__module__)
    if home is not None and "<locals>" not in inner.__qualname__:
        yield home, inner.__qualname__.partition(".")[0]


# ---- fixtures --------------------------------------------------------------------------------------------------------------

_OF_PYTEST = {"caplog", "capsys", "monkeypatch", "request", "tmp_path"}


def without_fixture(home: types.ModuleType, around: Iterable[types.ModuleType] = ()) -> list[str]:
    """What tests of a module ask for and nothing gives. around: the conftests of its folders."""
    known = _OF_PYTEST.union(vars(home), *map(vars, around))
    tests = {name: test for name, test in vars(home).items() if name.startswith("test_") and inspect.isfunction(test)}
    return [
        f"{home.__name__}: {name} asks for {fixture}"
        for name, test in tests.items()
        for fixture in sorted(_asked(test) - known)
    ]


def _asked(test: types.FunctionType) -> set[str]:
    """Names of fixtures."""
    marks = getattr(test, "pytestmark", [])
    given = [mark.args[0] for mark in marks if mark.name == "parametrize"]
    named = {x.strip() for names in given for x in (names.split(",") if isinstance(names, str) else names)}
    asked = {x.name for x in inspect.signature(test).parameters.values() if x.default is x.empty}
    return (asked - named).union(*(mark.args for mark in marks if mark.name == "usefixtures"))
