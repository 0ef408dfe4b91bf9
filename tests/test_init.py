from __future__ import annotations

import subprocess
import sys

import pytest

import attn_compiler


def test_importing_is_cheap() -> None:
    code = "import sys, attn_compiler; print([m for m in ('torch', 'transformers', 'rich') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("name", attn_compiler.__all__)
def test_public_names(name: str) -> None:
    assert getattr(attn_compiler, name) is not None
    assert name in dir(attn_compiler)


def test_functions_are_not_shadowed_by_modules() -> None:
    assert callable(attn_compiler.explain)
    assert callable(attn_compiler.reports)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'explian'"):
        attn_compiler.explian  # type: ignore[attr-defined]  # noqa: B018
