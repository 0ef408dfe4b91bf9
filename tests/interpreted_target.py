"""A machine whose Triton is interpreted, for sites that are decided in a process whose own is not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from attn_compiler.spec import target


@contextlib.contextmanager
def triton_interpreted() -> Iterator[None]:
    """Targets that are asked for here run Triton's interpreter, of Triton 3.7.0."""
    with (
        mock.patch.object(target, "TRITON_INTERPRETED", True),
        mock.patch.object(target, "_triton_version", return_value="3.7.0"),
    ):
        yield
