"""The table of options, from the docstring of `Options`: one line a field, as "name: what it does"."""

from __future__ import annotations

import dataclasses
import inspect
import re

from attn_compiler.options.options import Options


def described() -> dict[str, str]:
    """What the docstring says of each field, by name."""
    text = inspect.getdoc(Options) or ""
    names = [field.name for field in dataclasses.fields(Options)]
    pieces = re.split(rf"^({'|'.join(names)}): ", text, flags=re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in zip(pieces[1::2], pieces[2::2], strict=True)}


def table() -> str:
    """Every option with its default; pages that its words name become links."""
    words = {name: re.sub(r"docs/(\w+)\.md", r"[\1](../\1.md)", text) for name, text in described().items()}
    rows = [
        f"| `{field.name}` | `{field.default!r}` | {words[field.name].replace('|', chr(92) + '|')} |"
        for field in dataclasses.fields(Options)
    ]
    return "\n".join(["| option | default | what it does |", "| --- | --- | --- |", *rows])
