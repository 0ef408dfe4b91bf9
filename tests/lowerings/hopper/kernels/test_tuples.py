"""The tuples of the kernel for Hopper: all fields are read, and none is told from another by its position."""

from __future__ import annotations

from pathlib import Path

from attn_compiler.lowerings.hopper.kernels import tuples
from tests.lowerings import kernel_tuples

KINDS = kernel_tuples.tuples(tuples)
FOLDER = Path(str(tuples.__file__)).parent
KERNELS = tuple(path for path in FOLDER.glob("*.py") if path.name != "tuples.py" and "fp8" not in path.name)


def test_each_field_is_read_by_a_kernel() -> None:
    assert KINDS
    assert kernel_tuples.unread(KINDS, *KERNELS) == []


def test_they_are_made_by_name() -> None:
    """Triton's cache of compiled kernels does not see what fields are called."""
    assert kernel_tuples.made_by_position(KINDS, *KERNELS, FOLDER.parent / "launch.py") == []


def test_they_need_no_triton() -> None:
    assert not any(name.split(".")[0] == "triton" for name in kernel_tuples.imports(tuples))
