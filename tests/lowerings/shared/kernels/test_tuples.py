"""The tuples of our Triton kernels: all fields are read, none is told from another by its position, and launches name them."""

from __future__ import annotations

from pathlib import Path

import attn_compiler.lowerings as lowerings
from attn_compiler.lowerings.shared.kernels import tuples
from tests.lowerings import kernel_tuples

KINDS = kernel_tuples.tuples(tuples)
FILES = tuple(Path(str(lowerings.__file__)).parent.rglob("*.py"))


def test_each_field_is_read_by_a_kernel() -> None:
    assert len(KINDS) > 10
    assert kernel_tuples.unread(KINDS, *FILES) == []


def test_they_are_made_by_name() -> None:
    """Triton's cache of compiled kernels does not see what fields are called."""
    assert kernel_tuples.made_by_position(KINDS, *FILES) == []


def test_they_need_no_triton() -> None:
    assert not any(name.split(".")[0] == "triton" for name in kernel_tuples.imports(tuples))


def test_what_a_launch_names_belongs_to_one_tuple() -> None:
    """A launch gives numbers by their bare names, so no two tuples that a kernel takes share one."""
    fields = [field for kind in tuples.TAKEN.values() for field in kind._fields]
    assert len(set(fields)) == len(fields)
    assert set(tuples.TAKEN.values()) <= set(KINDS.values())
