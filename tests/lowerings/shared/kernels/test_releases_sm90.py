"""What differs between Gluon's releases: each name is one of the installed Triton's own. What it does: the kernels' own tests."""

from __future__ import annotations

import pytest
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import is_builtin

from attn_compiler.lowerings.shared.kernels import releases_sm90


@pytest.mark.parametrize("name", ["barrier_of_threads", "async_load", "async_store", "reinterpret", "add_from_shared"])
def test_gluon_takes_each(name: str) -> None:
    assert is_builtin(getattr(releases_sm90, name))


def test_they_are_those_of_the_release() -> None:
    assert releases_sm90.async_load in (getattr(tma, "async_load", None), tma.async_copy_global_to_shared)
    assert releases_sm90.async_store in (getattr(tma, "async_store", None), tma.async_copy_shared_to_global)
    assert releases_sm90.barrier_of_threads in (getattr(gl, name, None) for name in ("barrier", "thread_barrier"))
    assert hasattr(shared_memory_descriptor, releases_sm90._REINTERPRET)
