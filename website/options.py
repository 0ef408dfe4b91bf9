"""The table of options, from the docstring of `Options`: one line a field, as "name: what it does"."""

from __future__ import annotations

import dataclasses
import inspect
import re

from attn_compiler.options.options import Options

HEAD = """# Options

`torch.compile(model, backend="attn_compiler", options={...})`. A key may have the prefix `attn.`; keys that are not ours are Inductor's
(`torch._inductor.list_options()`). A wrong key or value is an error at once (AC901, AC902).
`attn_compiler.explain(model, x, options={...})` takes the same.

| option | default | what it does |
| --- | --- | --- |
"""


def described() -> dict[str, str]:
    """What the docstring says of each field, by name."""
    text = inspect.getdoc(Options) or ""
    names = [field.name for field in dataclasses.fields(Options)]
    pieces = re.split(rf"^({'|'.join(names)}): ", text, flags=re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in zip(pieces[1::2], pieces[2::2], strict=True)}


def page() -> str:
    """The page of options."""
    words = described()
    rows = [
        f"| `{field.name}` | `{field.default!r}` | {words[field.name].replace('|', chr(92) + '|')} |"
        for field in dataclasses.fields(Options)
    ]
    return HEAD + "\n".join(rows) + "\n"
