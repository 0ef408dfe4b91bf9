"""Functions of transformers with a word of their text changed, each in a module of its own."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Mapping
from pathlib import Path

_HEAD = """\
import torch
import torch.nn.functional as F
from transformers.utils import is_torchdynamo_exporting

"""
_PARTS = {
    "torch_chunk_gated_delta_rule": ("qwen3_next", ("l2norm",)),
    "torch_recurrent_gated_delta_rule": ("qwen3_next", ("l2norm",)),
    "chunk_kimi_delta_attention": ("kimi_linear", ("l2norm",)),
    "recurrent_kimi_delta_attention": ("kimi_linear", ("l2norm",)),
    "mamba2_chunk_scan": ("bamba", ("pad_tensor_by_size", "reshape_into_chunks", "segment_sum")),
    "mamba2_selective_state_update": ("bamba", ()),
}


def own(name: str) -> types.FunctionType:
    """The function of transformers itself."""
    family, _ = _PARTS[name]
    found = inspect.unwrap(getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name))
    assert isinstance(found, types.FunctionType)
    return found


def variant(folder: Path, name: str, edits: Mapping[str, str]) -> types.FunctionType:
    """The function with these words in the place of others."""
    family, parts = _PARTS[name]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    texts = [inspect.getsource(inspect.unwrap(getattr(module, part))) for part in (*parts, name)]
    text = _HEAD + "\n\n".join(_undecorated(one) for one in texts)
    for before, after in edits.items():
        assert before in text, before
        text = text.replace(before, after)
    called = f"linear_variant_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    found = getattr(module_of(folder, called, text), name)
    assert isinstance(found, types.FunctionType)
    return found


def module_of(folder: Path, name: str, text: str) -> types.ModuleType:
    """A module of a file of that text, imported under that name."""
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def _undecorated(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join(lines[next(i for i, line in enumerate(lines) if line.startswith("def ")) :])
