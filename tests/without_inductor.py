"""Inductor's place is taken by AOTAutograd, whose graphs run op by op: for tests that are about what a caller does with compiled code,
and not about Inductor's. Its C++ takes seconds a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch._dynamo.backends.debugging import aot_eager
from torch._inductor import compile_fx


@contextlib.contextmanager
def without_inductor() -> Iterator[None]:
    """Inside, for `torch.compile` without a backend as for ours."""

    def op_by_op(gm: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return aot_eager(gm, inputs)

    with mock.patch.object(compile_fx, "compile_fx", op_by_op):
        yield
