"""Text of frozen dataclasses, and its inverse, for leaf ops, reports and caches. Equal values have equal texts: canonical JSON.

A dataclass is an object with its name under "kind"; a tuple is a list; an expression (index_expr) is {"expr": its class, "of": its fields},
which is shorter. An enum is {"kind": its class, "value": ...}. A field declared with UNSAID is left out if it has its default value.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import typing
from collections.abc import Iterable
from typing import Any, ClassVar, Self, TypeVar

from attn_compiler import index_expr

T = TypeVar("T")

_EXPRESSIONS: dict[str, type[Any]] = {cls.__name__: cls for cls in typing.get_args(index_expr.Expr)}
#: metadata of a rarely set field: left out at its default, so that older texts stay the same
UNSAID = {"unsaid": True}


class Codec:
    """Texts of some classes.

    classes: dataclasses and enums that may occur in a text, each with a unique name.
    brief: fields with their default value are left out.
    """

    def __init__(self, classes: Iterable[type[Any]], *, brief: bool = False) -> None:
        self._classes = tuple(dict.fromkeys(classes))
        self._by_name = {cls.__name__: cls for cls in self._classes}
        if len(self._by_name) < len(self._classes):
            raise ValueError("two classes of a codec have one name")
        self._brief = brief
        self._parsed = functools.lru_cache(maxsize=1024)(lambda text: self.from_data(json.loads(text)))

    def extended(self, *classes: type[Any], brief: bool = False) -> Codec:
        """Return a codec of further classes, too."""
        return Codec((*self._classes, *classes), brief=brief)

    def text(self, value: Any) -> str:
        """Return canonical JSON."""
        return json.dumps(self.data(value), sort_keys=True, separators=(",", ":"))

    def value(self, text: str, wanted: type[T]) -> T:
        """Parse a text, once each. Raises TypeError if it is of another class, ValueError if of an unknown one."""
        found = self._parsed(text)
        if not isinstance(found, wanted):
            raise TypeError(f"expected the text of {wanted.__name__}, got that of {type(found).__name__}")
        return found

    def data(self, value: Any) -> Any:
        """Convert a value to lists and dictionaries, which `text` writes as JSON."""
        if isinstance(value, enum.Enum):
            return {"kind": type(value).__name__, "value": value.value}
        if type(value).__name__ in _EXPRESSIONS:
            return {"expr": type(value).__name__, "of": [self.data(x) for x in _fields(value).values()]}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            usual = {f.name: f.default for f in dataclasses.fields(value) if self._brief or "unsaid" in f.metadata}
            said = {k: x for k, x in _fields(value).items() if k not in usual or not _is_same(x, usual[k])}
            return {"kind": type(value).__name__, **{name: self.data(x) for name, x in said.items()}}
        if isinstance(value, tuple):
            return [self.data(x) for x in value]
        return value

    def from_data(self, data: Any) -> Any:
        """Build a value from parsed JSON, the inverse of `data`. Raises ValueError for an unknown class."""
        if isinstance(data, list):
            return tuple(self.from_data(x) for x in data)
        if not isinstance(data, dict):
            return data
        if "expr" in data:
            return _EXPRESSIONS[data["expr"]](*map(self.from_data, data["of"]))
        cls = self._by_name.get(data.get("kind", ""))
        if cls is None:
            known = ", ".join(sorted(self._by_name))
            raise ValueError(f"a text of an unknown kind, {data.get('kind')!r}; known are {known}")
        if issubclass(cls, enum.Enum):
            return cls(data["value"])
        return cls(**{name: self.from_data(x) for name, x in data.items() if name != "kind"})


class Coded:
    """A base of frozen dataclasses with texts of their own. codec: of the class and of those of its fields."""

    __slots__ = ()
    codec: ClassVar[Codec]

    def to_text(self) -> str:
        """Return canonical JSON: equal values have equal texts."""
        return self.codec.text(self)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse the text of `to_text`. Equal texts are parsed once."""
        return cls.codec.value(text, cls)


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


def _is_same(value: Any, usual: Any) -> bool:
    """Return True if equal and of one type: 0, 0.0 and False are different texts."""
    return usual is not dataclasses.MISSING and type(value) is type(usual) and value == usual
