"""The tuples of the kernel over a latent for Hopper: all fields are read, and none is told from another by its position."""

from __future__ import annotations

from pathlib import Path

from attn_compiler.lowerings.decode.kernels import latent_sm90_tuples as tuples
from tests.lowerings import kernel_tuples

KINDS = kernel_tuples.tuples(tuples)
KERNEL = Path(str(tuples.__file__)).with_name("latent_sm90.py")


def test_each_field_is_read_by_the_kernel() -> None:
    assert KINDS
    assert kernel_tuples.unread(KINDS, KERNEL) == []


def test_they_are_made_by_name() -> None:
    """Triton's cache of compiled kernels does not see what fields are called."""
    assert kernel_tuples.made_by_position(KINDS, KERNEL, KERNEL.parents[1] / "latent_launch.py") == []


def test_they_need_no_triton() -> None:
    assert not any(name.split(".")[0] == "triton" for name in kernel_tuples.imports(tuples))
