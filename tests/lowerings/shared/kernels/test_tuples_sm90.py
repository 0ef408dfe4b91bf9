"""The tuples of kernels for Hopper: all fields are read, and none is told from another by its position."""

from __future__ import annotations

from pathlib import Path

import attn_compiler.lowerings as lowerings
from attn_compiler.lowerings.shared.kernels import tuples_sm90
from tests.lowerings import kernel_tuples

KINDS = kernel_tuples.tuples(tuples_sm90)
FILES = tuple(Path(str(lowerings.__file__)).parent.rglob("*.py"))


def test_each_field_is_read_by_a_kernel() -> None:
    assert KINDS
    assert kernel_tuples.unread(KINDS, *FILES) == []


def test_they_are_made_by_name() -> None:
    """Triton's cache of compiled kernels does not see what fields are called."""
    assert kernel_tuples.made_by_position(KINDS, *FILES) == []


def test_they_need_no_triton() -> None:
    assert not any(name.split(".")[0] == "triton" for name in kernel_tuples.imports(tuples_sm90))
