from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import linking


def _script(path: Path, code: int) -> str:
    path.write_text(f"#!/bin/sh\nexit {code}\n")
    path.chmod(0o755)
    return str(path)


def test_one_that_compiles_and_does_not_link_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, right = _script(tmp_path / "broken", 1), _script(tmp_path / "right", 0)
    monkeypatch.setenv("CXX", broken)
    monkeypatch.setattr(linking, "OTHERS", ("no such compiler", right))
    assert linking.compiler.__wrapped__() == right


def test_this_machines_compiler_links() -> None:
    found = linking.compiler()
    assert found is not None
    assert linking.settings() == {"cpp.cxx": (None, found)}
