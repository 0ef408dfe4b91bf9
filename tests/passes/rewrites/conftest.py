"""Tests of the cache of rewrites switch it on, each with a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_compiler.torch_private.store import FOLDER


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where rewrites are kept."""
    monkeypatch.setenv("ATTN_COMPILER_CACHE_REWRITES", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / FOLDER
