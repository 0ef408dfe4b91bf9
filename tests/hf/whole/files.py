"""Modelling files of the installed transformers, and the classes of each that attend, read from their text alone."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: calls that are an attention by themselves
_FUSED = re.compile(
    r"ALL_ATTENTION_FUNCTIONS|scaled_dot_product_attention\(|MultiheadAttention\(|multi_head_attention_forward\("
)
_SOFTMAX, _PRODUCT = re.compile(r"softmax\(|Softmax\("), re.compile(r"matmul\(|einsum\(|bmm\(|baddbmm\(| @ ")


@dataclass(frozen=True, kw_only=True)
class File:
    """name: such as "llama/modeling_llama.py". module: to import. attending: its classes that attend, or call a function that does."""

    name: str
    module: str
    attending: tuple[str, ...]


def files() -> list[File]:
    """Every modelling file with an attention, in the order of names."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return []
    root = Path(spec.origin).parent / "models"
    found = []
    for path in sorted(root.glob("*/modeling_*.py")):
        classes = tuple(attending(path.read_text(encoding="utf-8")))
        if classes:
            name = path.relative_to(root).as_posix()
            found.append(
                File(name=name, module=f"transformers.models.{name[:-3].replace('/', '.')}", attending=classes)
            )
    return found


def attending(source: str) -> Iterator[str]:
    """Classes with an attention of their own: a fused call, a softmax beside a product, or a call of a function that has both."""
    tree = ast.parse(source)
    texts = {node.name: _code(node) for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and _attends(texts[node.name])]
    called = re.compile(rf"\b({'|'.join(functions)})\(") if functions else None
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            text = texts[node.name]
            if _attends(text) or (called is not None and called.search(text)):
                yield node.name


def _code(node: ast.AST) -> str:
    """Without comments and docstrings, which show how a model is called."""
    for inner in ast.walk(node):
        if isinstance(inner, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(inner, clean=False) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
    return ast.unparse(node)


def _attends(text: str) -> bool:
    return bool(_FUSED.search(text)) or bool(_SOFTMAX.search(text) and _PRODUCT.search(text))
